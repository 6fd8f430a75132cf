"""A timeline in a few lines of text: how busy each process was, what it waited for, and where time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.tracing.tracer import LEFT_OUT, PHASE

_SHOWN_GAPS = 5


class Gap(NamedTuple):
    """Time in which a process had nothing to do, in microseconds of the timeline, and what was before and after."""

    process: str
    start: float
    end: float
    before: str
    after: str


@dataclass(frozen=True)
class ProcessUse:
    """What a process did with its time.

    Attributes:
        name: of the process.
        busy: share of the time in which it ran a verb.
        communication: share in which it waited in collectives.
        copies: share in which it moved weights or optimizer state from or to host memory.
    """

    name: str
    busy: float
    communication: float
    copies: float


@dataclass(frozen=True)
class Summary:
    """See :func:`summarize`.

    Attributes:
        seconds: of the timeline, from the first event of a role's process to the last.
        steps: that were recorded.
        processes: of roles.
        phases: seconds by phase, over all steps, without the start; what is in another phase counts there only.
        gaps: the longest, the longest first.
        left_out: which events the timeline lacks and why, by process, a line of text each.
    """

    seconds: float
    steps: int
    processes: Sequence[ProcessUse]
    phases: Mapping[str, float]
    gaps: Sequence[Gap]
    left_out: Sequence[str] = ()

    def render(self) -> str:
        """As text, a table after the other."""
        width = max((len(use.name) for use in self.processes), default=7)
        lines = [f"{self.steps} steps, {len(self.processes)} processes, {self.seconds:.2f} s", ""]
        lines.append(f"{'process':<{width}}  {'busy':>6}  {'waits in collectives':>20}  {'copies':>6}")
        for use in self.processes:
            shares = f"{use.busy:>6.1%}  {use.communication:>20.1%}  {use.copies:>6.1%}"
            lines.append(f"{use.name:<{width}}  {shares}")
        lines += ["", f"{'phase':<{width}}  {'s':>8}  {'share':>6}"]
        total = sum(self.phases.values()) or 1.0
        for name, seconds in sorted(self.phases.items(), key=lambda item: -item[1]):
            lines.append(f"{name:<{width}}  {seconds:>8.3f}  {seconds / total:>6.1%}")
        lines += ["", "longest time without work"]
        for gap in self.gaps:
            length = (gap.end - gap.start) / 1e6
            between = f"at {gap.start / 1e6:.3f} s, between {gap.before} and {gap.after}"
            lines.append(f"{gap.process:<{width}}  {length:>8.3f} s  {between}")
        if self.left_out:
            lines += ["", "not in this timeline", *self.left_out]
        return "\n".join(lines)


def summarize(events: Iterable[Mapping[str, Any]]) -> Summary:
    """What the events of a timeline come to.

    Args:
        events: as :func:`~megarl.tracing.trace_file.read_trace` reads them.
    """
    names: dict[int, str] = {}
    spans: dict[tuple[int, str], list[tuple[float, float, str]]] = defaultdict(list)
    lacks: list[tuple[int, float, str]] = []
    steps = 0
    for event in events:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            spans[event["pid"], event.get("cat", "")].append(span)
        elif event.get("cat") == "step":
            steps += 1
        elif event.get("cat") == LEFT_OUT:
            lacks.append((event["pid"], event["ts"], event["name"]))
    verbs = {pid: sorted(found) for (pid, category), found in spans.items() if category == "verb"}
    start = min((found[0][0] for found in verbs.values()), default=0.0)
    end = max((stop for found in verbs.values() for _, stop, _ in found), default=0.0)
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
        [one for (_, category), found in spans.items() if category == PHASE for one in found if one[1] > start]
    )
    told = [f"{names.get(pid, str(pid))}, until {at / 1e6:.3f} s: {text}" for pid, at, text in sorted(lacks)]
    return Summary((end - start) / 1e6, steps, processes, phases, gaps[:_SHOWN_GAPS], told)


def covered(spans: Iterable[tuple[float, float, str]]) -> float:
    """Time in which at least one of some spans was under way."""
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def own_seconds(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Seconds by name of spans that nest, without what lies in an inner one."""
    seconds: dict[str, float] = defaultdict(float)
    outer: list[tuple[float, str]] = []
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while outer and outer[-1][0] <= start:
            outer.pop()
        if outer:
            seconds[outer[-1][1]] -= (end - start) / 1e6
        seconds[name] += (end - start) / 1e6
        outer.append((end, name))
    return dict(seconds)


def _gaps(process: str, spans: Sequence[tuple[float, float, str]]) -> Iterable[Gap]:
    """Times between spans, which are sorted by their start."""
    reached, before = spans[0][1], spans[0][2]
    for start, end, name in spans[1:]:
        if start > reached:
            yield Gap(process, reached, start, before, name)
        if end > reached:
            reached, before = end, name
