"""Who waits for whom in a run that does not move: from what all processes show, to a text that names the culprit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.tracing.ranks import parse_ranks
from megarl.tracing.stacks import DEAD, STOPPED, Frame, ProcessReport

_WAIT = re.compile(r"^(?P<call>\w+(?: \d+| #(?P<number>\d+))?) of (?P<group>.+ (?P<ranks>\[[\d, :]*\]))$")
_NO_ANSWER = "no answer"
_KNOWN_FRAMES = (
    ("megarl/rollout/sglang/http.py", "waits for the engine's HTTP server"),
    ("urllib/request.py", "waits for an HTTP answer"),
    ("http/client.py", "waits for an HTTP answer"),
    ("ssl.py", "waits for a network connection"),
    ("torch/distributed/rendezvous.py", "waits for its peers to join"),
    ("torch/distributed/distributed_c10d.py", "waits in torch.distributed"),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "waits for another pipeline stage"),
    ("ray/_private/worker.py", "waits for Ray"),
    ("subprocess.py", "waits for a process that it started"),
)
_INNER = re.compile(r"/(?:threading|selectors|socket|queue|functools|contextlib|asyncio/\w+)\.py$|^<")


@dataclass(frozen=True, eq=False)
class Seen:
    """A process of the run with what was seen of it.

    Attributes:
        role: name of its role; ``driver`` or ``reward process`` for those without one.
        rank: within the role.
        host: address of its node.
        report: what it does.
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
        """Of the text with its stacks."""
        return f"{self.role.replace(' ', '_')}-{self.rank}.txt"

    @property
    def spans(self) -> list[str]:
        """What is under way in it, from the outermost to the innermost."""
        return [span.name for span in self.report.board.spans] if self.report.board else []

    @property
    def is_unable(self) -> bool:
        """Whether it cannot go on by itself."""
        return self.report.state in (DEAD, STOPPED, _NO_ANSWER)


@dataclass(frozen=True)
class Wait:
    """A process in a collective."""

    call: str
    number: int | None
    group: str
    ranks: tuple[int, ...]


def unreachable(pid: int) -> ProcessReport:
    """Of a process on a node that does not answer."""
    return ProcessReport(pid, _NO_ANSWER)


def wait_of(seen: Seen) -> Wait | None:
    """The collective that a process is in."""
    for name in reversed(seen.spans):
        match = _WAIT.match(name)
        if match:
            number = int(match["number"]) if match["number"] else None
            return Wait(match["call"], number, match["group"], parse_ranks(match["ranks"]))
    return None


def explain(processes: Sequence[Seen]) -> str:
    """What each process does, those first that keep others waiting; a line each."""
    waits = {seen: wait for seen in processes if (wait := wait_of(seen)) and not seen.is_unable}
    awaited = _awaited(processes, waits)
    culprits = [seen for seen in processes if seen.is_unable or (seen in awaited and seen not in waits)]
    lines = [f"{seen.name} {doing(seen)}{_kept(awaited.get(seen, []))}" for seen in culprits]
    crossed = [seen for seen in awaited if seen in waits] if not culprits else []
    lines += [
        f"{seen.name} waits in {waits[seen].call} of {waits[seen].group}{_kept(awaited[seen])}: "
        "the ranks call collectives in different orders"
        for seen in crossed
    ]
    rest = [seen for seen in processes if seen not in culprits and seen not in crossed]
    lines += _waiting(waits, rest)
    at_work = [seen for seen in rest if seen not in waits and seen.spans and seen.role != "driver"]
    lines += [f"{seen.name} {doing(seen)}" for seen in at_work]
    lines += [f"{seen.name} {doing(seen)}" for seen in rest if seen.role == "driver"]
    idle = [seen.name for seen in rest if not seen.spans and seen.role != "driver"]
    return "\n".join([*lines, *([f"idle: {', '.join(idle)}"] if idle else [])])


def doing(seen: Seen) -> str:
    """What one process does, in words that follow its name."""
    report, spans = seen.report, seen.spans
    where = f" in {' > '.join(spans)}" if spans else ""
    if report.state == DEAD:
        return f"(pid {report.pid}) is gone"
    if report.state == _NO_ANSWER:
        return f"(pid {report.pid}): its node {seen.host} does not answer"
    if report.state == STOPPED:
        return f"(pid {report.pid} on {seen.host}) is stopped{where}; `kill -CONT {report.pid}` there lets it go on"
    stuck = [child for child in report.children if child.state in (STOPPED, DEAD)]
    of_children = "".join(f"; its process {child.pid} is {child.state}: {child.command}" for child in stuck)
    return f"is{where or ' between verbs'}, {place(report.frames)}{of_children}"


def place(frames: Sequence[Frame]) -> str:
    """Where a stack stands, from its innermost frame that says something."""
    if not frames:
        return "and told no stack"
    known = next((words for frame in frames[:6] for file, words in _KNOWN_FRAMES if frame.file.endswith(file)), "")
    outer = next((frame for frame in frames if not _INNER.search(frame.file)), frames[0])
    inner = "" if outer is frames[0] else f"{frames[0].function} < "
    return f"{known + ' ' if known else ''}at {inner}{outer}"


def render(seen: Seen) -> str:
    """All that is known of a process, as text."""
    report = seen.report
    lines = [f"{seen.name}, pid {report.pid} on {seen.host}: {report.state}", ""]
    if report.board is not None:
        for depth, span in enumerate(report.board.spans):
            lines.append(f"{'  ' * depth}{span.name}  since {(report.taken_ns - span.since_ns) / 1e9:.1f} s")
        lines += [
            f"collectives of {group}: {count.issued} begun, the last {count.last}"
            for group, count in report.board.counts.items()
        ]
    lines += [f"child {child.pid}: {child.state}: {child.command}" for child in report.children]
    return "\n".join([*lines, "", report.stacks or "no stacks: the process is gone, stopped, or does not tell"]) + "\n"


def write_stall(folder: Path, summary: str, processes: Iterable[Seen]) -> None:
    """Write the summary, and a text for each process, to a new folder."""
    folder.mkdir(parents=True)
    for seen in processes:
        (folder / seen.file_name).write_text(render(seen))
    (folder / "summary.txt").write_text(summary + "\n")


def _awaited(processes: Sequence[Seen], waits: Mapping[Seen, Wait]) -> dict[Seen, list[Seen]]:
    """By process, those that wait for it: members of their collective's group who are not in it."""
    by_place = {(seen.role, seen.rank): seen for seen in processes}
    found: dict[Seen, list[Seen]] = defaultdict(list)
    for waiting, wait in waits.items():
        for rank in wait.ranks:
            other = by_place.get((waiting.role, rank))
            if other is not None and other is not waiting and not _is_there(other, wait, waits):
                found[other].append(waiting)
    return found


def _is_there(other: Seen, wait: Wait, waits: Mapping[Seen, Wait]) -> bool:
    """Whether a member has begun the collective too: it is in it, or, as under NCCL, has gone on."""
    own = waits.get(other)
    if own is not None and own.group == wait.group:
        return own.number is None or wait.number is None or own.number >= wait.number
    if wait.number is None or other.report.board is None:
        return False
    count = other.report.board.counts.get(wait.group)
    return count is not None and count.issued >= wait.number


def _kept(waiting: Sequence[Seen]) -> str:
    """Whom a culprit keeps waiting."""
    if not waiting:
        return ""
    wait = wait_of(waiting[0])
    ranks = ", ".join(str(seen.rank) for seen in waiting)
    return f"; {waiting[0].role} rank{'s' * (len(waiting) > 1)} {ranks} wait{'s' * (len(waiting) == 1)} for it" + (
        f" in {wait.call} of {wait.group}" if wait else ""
    )


def _waiting(waits: Mapping[Seen, Wait], rest: Sequence[Seen]) -> list[str]:
    """A line for those who wait in the same collective."""
    together: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for seen in rest:
        if seen in waits:
            together[seen.role, waits[seen].call, waits[seen].group].append(seen.rank)
    return [
        f"{role} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)} in {call} of "
        f"{group}"
        for (role, call, group), ranks in together.items()
    ]
