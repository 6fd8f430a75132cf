"""Command line of ``megarl timeline``: busy share and waits of each process, seconds by phase, longest gaps."""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megarl.base.commands import exit_code
from megarl.base.formatting import table_lines
from megarl.tracing.trace_file import MAIN_LANE, read_trace
from megarl.tracing.tracer import MISSING_EVENTS, PHASE

_SHOWN_GAPS = 5


class Gap(NamedTuple):
    """Idle time of a process, in microseconds of the timeline, and the events before and after it."""

    process: str
    start: float
    end: float
    before: str
    after: str


@dataclass(frozen=True)
class ProcessUse:
    """Use of time of a process."""

    name: str
    busy: float  # share of the time in verbs
    communication: float  # share of the time in collectives
    copies: float  # share of the time in copies of weights or optimizer state from or to host memory


@dataclass(frozen=True)
class Summary:
    """Summary of a timeline; see :func:`summarize`."""

    seconds: float  # from the first to the last event of the roles' processes
    steps: int
    processes: Sequence[ProcessUse]  # use of time of each role's process
    phases: Mapping[str, float]  # seconds over all steps, without startup; inner phases count for themselves
    gaps: Sequence[Gap]  # the longest gaps, the longest first
    left_out: Sequence[str] = ()  # missing events and the reason, by process, as lines of text

    def render(self) -> str:
        """Return the summary as text tables."""
        uses = [["process", "busy", "waits in collectives", "copies"]]
        uses += [
            [use.name, f"{use.busy:.1%}", f"{use.communication:.1%}", f"{use.copies:.1%}"] for use in self.processes
        ]
        total = sum(self.phases.values()) or 1.0
        phases = [["phase", "s", "share"]]
        for name, seconds in sorted(self.phases.items(), key=lambda item: -item[1]):
            phases.append([name, f"{seconds:.3f}", f"{seconds / total:.1%}"])
        gaps = []
        for gap in self.gaps:
            between = f"at {gap.start / 1e6:.3f} s, between {gap.before} and {gap.after}"
            gaps.append([gap.process, f"{(gap.end - gap.start) / 1e6:.3f} s", between])
        lines = [f"{self.steps} steps, {len(self.processes)} processes, {self.seconds:.2f} s", ""]
        lines += [*table_lines(uses, "<>>>"), "", *table_lines(phases, "<>>"), ""]
        lines += ["longest time without work", *table_lines(gaps, "<>")]
        if self.left_out:
            lines += ["", "not in this timeline", *self.left_out]
        return "\n".join(lines)


def summarize(events: Iterable[Mapping[str, Any]]) -> Summary:
    """Summarize the events that :func:`~megarl.tracing.trace_file.read_trace` returns."""
    names: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    concurrent: list[tuple[float, float, str]] = []
    spans: dict[tuple[int, str], list[tuple[float, float, str]]] = defaultdict(list)
    missing: list[tuple[int, float, str]] = []
    steps = 0
    for event in events:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            lanes[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            spans[event["pid"], event.get("cat", "")].append(span)
            if event.get("cat") == PHASE and lanes.get((event["pid"], event.get("tid", 0)), MAIN_LANE) != MAIN_LANE:
                concurrent.append(span)
        elif event.get("cat") == "step":
            steps += 1
        elif event.get("cat") == MISSING_EVENTS:
            missing.append((event["pid"], event["ts"], event["name"]))
    verbs = {pid: sorted(members) for (pid, category), members in spans.items() if category == "verb"}
    start = min((members[0][0] for members in verbs.values()), default=0.0)
    end = max((stop for members in verbs.values() for _, stop, _ in members), default=0.0)
    length = (end - start) or 1.0
    processes = [
        ProcessUse(
            names.get(pid, str(pid)),
            covered(verbs[pid]) / length,
            covered(spans[pid, "communication"]) / length,
            covered(spans[pid, "copy"]) / length,
        )
        for pid in sorted(verbs)
    ]
    gaps = [gap for pid in sorted(verbs) for gap in _gaps(names.get(pid, str(pid)), verbs[pid])]
    gaps.sort(key=lambda gap: gap.start - gap.end)
    phases = own_seconds(
        [one for (_, category), members in spans.items() if category == PHASE for one in members if one[1] > start],
        concurrent,
    )
    lines = [f"{names.get(pid, str(pid))}, until {at / 1e6:.3f} s: {text}" for pid, at, text in sorted(missing)]
    return Summary((end - start) / 1e6, steps, processes, phases, gaps[:_SHOWN_GAPS], lines)


def covered(spans: Iterable[tuple[float, float, str]]) -> float:
    """Return the time covered by at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def own_seconds(
    spans: Iterable[tuple[float, float, str]], concurrent: Sequence[tuple[float, float, str]] = ()
) -> dict[str, float]:
    """Return seconds of nested spans by name without inner spans; ``concurrent`` ones run in lanes of their own."""
    seconds: dict[str, float] = defaultdict(float)
    outer: list[tuple[float, str]] = []
    in_lanes, reached = set(concurrent), float("-inf")
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while outer and outer[-1][0] <= start:
            outer.pop()
        seconds[name] += (end - start) / 1e6
        uncovered = end - max(start, reached) if (start, end, name) in in_lanes else end - start
        if outer:
            seconds[outer[-1][1]] -= max(0.0, uncovered) / 1e6
        if (start, end, name) in in_lanes:
            reached = max(reached, end)
        else:
            outer.append((end, name))
    return dict(seconds)


def _gaps(process: str, spans: Sequence[tuple[float, float, str]]) -> Iterable[Gap]:
    """Yield the gaps between spans, which are sorted by start."""
    reached, before = spans[0][1], spans[0][2]
    for start, end, name in spans[1:]:
        if start > reached:
            yield Gap(process, reached, start, before, name)
        if end > reached:
            reached, before = end, name


def main(argv: Sequence[str]) -> int:
    """Print the summary of a timeline; return the exit code: 0, or 2 without a timeline."""
    parser = argparse.ArgumentParser(prog="megarl timeline", description="Summarize the timeline of a run.")
    parser.add_argument("path", type=Path, help="a run's folder, or a trace file")
    parser.add_argument(
        "--out", type=Path, help="also write the events to one complete file, compressed if its name ends in .gz"
    )
    options = parser.parse_args(argv)
    return exit_code(lambda: _print(options))


def _print(options: argparse.Namespace) -> int:
    events = read_trace(options.path)
    print(summarize(events).render())
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        opened = gzip.open if options.out.suffix == ".gz" else open
        with opened(options.out, "wt", encoding="utf-8") as file:
            lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
            file.write(f"[\n{lines}\n]\n")
    return 0
