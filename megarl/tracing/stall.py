"""Stall diagnosis: find the process that the others wait for, from the boards and stacks of all processes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.base.run_writer import RUN_WRITER
from megarl.tracing.board import parse_ranks
from megarl.tracing.stacks import DEAD, STOPPED, Frame, ProcessReport

_WAIT = re.compile(r"^(?P<call>\w+(?: \d+| #(?P<number>\d+))?) of (?P<group>.+ (?P<ranks>\[[\d, :]*\]))$")
_NO_REPLY = "no reply"
_KNOWN_FRAMES = (
    ("megarl/rollout/sglang/http.py", "waits for the engine's HTTP server"),
    ("urllib/request.py", "waits for an HTTP reply"),
    ("http/client.py", "waits for an HTTP reply"),
    ("ssl.py", "waits for a network connection"),
    ("torch/distributed/rendezvous.py", "waits for its peers to join"),
    ("torch/distributed/distributed_c10d.py", "waits in torch.distributed"),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "waits for another pipeline stage"),
    ("ray/_private/worker.py", "waits for Ray"),
    ("subprocess.py", "waits for a child process"),
)
_MAIN_LOOP = "main_loop"  # of ray/_private/worker.py: the outer frame of every worker
_INNER = re.compile(r"/(?:threading|selectors|socket|queue|functools|contextlib|asyncio/\w+)\.py$|^<")


@dataclass(frozen=True, eq=False)
class ObservedProcess:
    """A process of the run with its observed state.

    Attributes:
        role: name of its role; ``driver`` and ``reward process`` for processes without a role.
        host: address of its node.
    """

    role: str
    rank: int
    host: str
    report: ProcessReport

    @property
    def name(self) -> str:
        """Role and rank."""
        return self.role if self.role == "driver" else f"{self.role} rank {self.rank}"

    @property
    def file_name(self) -> str:
        """Name of the file with its stacks."""
        return f"{self.role.replace(' ', '_')}-{self.rank}.txt"

    @property
    def spans(self) -> list[str]:
        """Names of its open spans, outermost first."""
        return [span.name for span in self.report.board.spans] if self.report.board else []

    @property
    def is_stuck(self) -> bool:
        """Whether it is dead, stopped, or on a node that does not reply."""
        return self.report.state in (DEAD, STOPPED, _NO_REPLY)


@dataclass(frozen=True)
class Wait:
    """The collective that a process waits in."""

    call: str
    number: int | None
    group: str
    ranks: tuple[int, ...]


def unreachable_process(pid: int) -> ProcessReport:
    """Report of a process on a node that does not reply."""
    return ProcessReport(pid, _NO_REPLY)


def _current_wait(process: ObservedProcess) -> Wait | None:
    for name in reversed(process.spans):
        match = _WAIT.match(name)
        if match:
            number = int(match["number"]) if match["number"] else None
            return Wait(match["call"], number, match["group"], parse_ranks(match["ranks"]))
    return None


def explain_stall(processes: Sequence[ObservedProcess], collected_in_s: float = 0.0) -> str:
    """Describe the activity of each process, one line each, culprits first.

    Args:
        collected_in_s: time between the first and the last observation. Two processes that were observed so far apart
            may seem to call collectives in different orders, unless each waits longer than that.
    """
    waits = {process: wait for process in processes if (wait := _current_wait(process)) and not process.is_stuck}
    awaited = _waiters(processes, waits)
    culprits = [process for process in processes if process.is_stuck or (process in awaited and process not in waits)]
    several = len({process.host for process in processes}) > 1

    def named(process: ObservedProcess) -> str:
        is_placed = several and process.report.state not in (STOPPED, _NO_REPLY)  # their activity names the host
        return f"{process.name} on {process.host}" if is_placed else process.name

    lines = [
        f"{named(process)} {describe_activity(process)}{_describe_waiters(awaited.get(process, []))}"
        for process in culprits
    ]
    crossed = [process for process in awaited if process in waits] if not culprits else []
    if any(_seconds_in_wait(process) < collected_in_s for process in crossed):
        crossed = []
    lines += [
        f"{named(process)} waits in {waits[process].call} of {waits[process].group}"
        f"{_describe_waiters(awaited[process])}: the ranks call collectives in different orders"
        for process in crossed
    ]
    rest = [process for process in processes if process not in culprits and process not in crossed]
    lines += _waiting_lines(waits, rest)
    at_work = [process for process in rest if process not in waits and process.spans and process.role != "driver"]
    lines += [f"{named(process)} {describe_activity(process)}" for process in at_work]
    lines += [f"{process.name} {describe_activity(process)}" for process in rest if process.role == "driver"]
    idle = [process.name for process in rest if not process.spans and process.role != "driver"]
    return "\n".join([*lines, *([f"idle: {', '.join(idle)}"] if idle else [])])


def describe_activity(process: ObservedProcess) -> str:
    """Describe the activity of a process, as text that follows its name."""
    report, spans = process.report, process.spans
    inside = f" in {' > '.join(spans)}" if spans else ""
    if report.state == DEAD:
        return f"(pid {report.pid}) is gone"
    if report.state == _NO_REPLY:
        return f"(pid {report.pid}): its node {process.host} does not reply"
    if report.state == STOPPED:
        return f"(pid {report.pid} on {process.host}) is stopped{inside}; `kill -CONT {report.pid}` there resumes it"
    stuck = [child for child in report.children if child.state in (STOPPED, DEAD)]
    of_children = "".join(f"; its process {child.pid} is {child.state}: {child.command}" for child in stuck)
    return f"is{inside or ' between verbs'}, {describe_frames(report.frames)}{of_children}"


def describe_frames(frames: Sequence[Frame]) -> str:
    """Describe the location of a stack by its innermost informative frame."""
    if not frames:
        return "without a stack"
    inner_frames = [frame for frame in frames[:6] if frame.function != _MAIN_LOOP]
    wait = next((words for frame in inner_frames for file, words in _KNOWN_FRAMES if frame.file.endswith(file)), "")
    outer = next((frame for frame in frames if not _INNER.search(frame.file)), frames[0])
    inner = "" if outer is frames[0] else f"{frames[0].function} < "
    return f"{wait + ' ' if wait else ''}at {inner}{outer}"


def _render_process(process: ObservedProcess) -> str:
    """Format the observed state of a process as text."""
    report = process.report
    lines = [f"{process.name}, pid {report.pid} on {process.host}: {report.state}", ""]
    if report.board is not None:
        for depth, span in enumerate(report.board.spans):
            lines.append(f"{'  ' * depth}{span.name}  since {(report.taken_ns - span.since_ns) / 1e9:.1f} s")
        lines += [
            f"collectives of {group}: {count.issued} issued, the last {count.last}"
            for group, count in report.board.counts.items()
        ]
    lines += [f"child {child.pid}: {child.state}: {child.command}" for child in report.children]
    stacks = report.stacks or "no stacks: the process is gone or stopped, or does not serve its stacks"
    return "\n".join([*lines, "", stacks]) + "\n"


def write_stall(folder: Path, summary: str, processes: Iterable[ObservedProcess]) -> None:
    """Write the summary and a file per process into a new folder."""
    for process in processes:
        RUN_WRITER.replace(folder / process.file_name, _render_process(process))
    RUN_WRITER.replace(folder / "summary.txt", summary + "\n")


def _waiters(
    processes: Sequence[ObservedProcess], waits: Mapping[ObservedProcess, Wait]
) -> dict[ObservedProcess, list[ObservedProcess]]:
    """Map each awaited process to its waiters: it is in the group of their collective, but has not issued it."""
    by_rank = {(process.role, process.rank): process for process in processes}
    waiters: dict[ObservedProcess, list[ObservedProcess]] = defaultdict(list)
    for waiting, wait in waits.items():
        for rank in wait.ranks:
            member = by_rank.get((waiting.role, rank))
            if member is not None and member is not waiting and not _has_issued(member, wait, waits):
                waiters[member].append(waiting)
    return waiters


def _has_issued(member: ObservedProcess, wait: Wait, waits: Mapping[ObservedProcess, Wait]) -> bool:
    """Whether a member of the group has issued the collective: it is in it, or has passed it (NCCL)."""
    its_wait = waits.get(member)
    if its_wait is not None and its_wait.group == wait.group:
        return its_wait.number is None or wait.number is None or its_wait.number >= wait.number
    if wait.number is None or member.report.board is None:
        return False
    count = member.report.board.counts.get(wait.group)
    return count is not None and count.issued >= wait.number


def _describe_waiters(waiting: Sequence[ObservedProcess]) -> str:
    if not waiting:
        return ""
    wait = _current_wait(waiting[0])
    longest = max(_seconds_in_wait(process) for process in waiting)
    ranks = ", ".join(str(process.rank) for process in waiting)
    return f"; {waiting[0].role} rank{'s' * (len(waiting) > 1)} {ranks} wait{'s' * (len(waiting) == 1)} for it" + (
        f" in {wait.call} of {wait.group}{f', for {longest:.0f} s' if longest >= 1 else ''}" if wait else ""
    )


def _seconds_in_wait(process: ObservedProcess) -> float:
    """Return the time since the start of the collective that a process waits in."""
    report = process.report
    spans = report.board.spans if report.board else ()
    since = next((span.since_ns for span in reversed(spans) if _WAIT.match(span.name)), report.taken_ns)
    return (report.taken_ns - since) / 1e9


def _waiting_lines(waits: Mapping[ObservedProcess, Wait], rest: Sequence[ObservedProcess]) -> list[str]:
    ranks_of: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for process in rest:
        if process in waits:
            ranks_of[process.role, waits[process].call, waits[process].group].append(process.rank)
    return [
        f"{role} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)} in {call} of "
        f"{group}"
        for (role, call, group), ranks in ranks_of.items()
    ]
