"""Shows on a process's board which collective of which group it waits in, and how many it has begun of each.

Every collective goes through a method of ``torch.distributed.ProcessGroup``, and every wait for one through
``Work.wait``, from wherever their callers have imported the functions; there they are seen. Ranks of a group begin its
collectives in one order, so that the one that has begun fewer than its peers is the one they wait for: this holds for
NCCL too, where a process goes on after it has begun one.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from megarl.tracing.ranks import describe_ranks
from megarl.tracing.tracer import TRACER

_TOGETHER = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    "reduce_scatter_tensor_coalesced",
)
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
SHORTEST_WAIT_NS = 50_000
"""Shorter waits are not in the timeline."""
_MOST_UNDER_WAY = 64
_SHOWN = {
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "_reduce_scatter_base": "reduce_scatter",
}


class CollectiveWatch:
    """Counts collectives by group and knows what each wait is for."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = defaultdict(int)
        self._labels: dict[str, str] = {}
        self._works: deque[tuple[int, str]] = deque(maxlen=_MOST_UNDER_WAY)

    def issue(self, group: Any, name: str, args: tuple[Any, ...]) -> str:
        """A call begins; returns what is shown of it."""
        label = self.label(group)
        if name in _BETWEEN_TWO:
            peer = f" {args[1]}" if name != "recv_anysource" and len(args) > 1 else ""
            return f"{name}{peer} of {label}"
        self._counts[label] += 1
        if TRACER.board is not None:
            TRACER.board.issue(label, name, self._counts[label])
        return f"{name} #{self._counts[label]} of {label}"

    def under_way(self, work: Any, shown: str) -> None:
        """A call has returned something to wait for."""
        self._works.append((id(work), shown))

    def waits_for(self, work: Any) -> str:
        """What is shown of a wait."""
        return next((shown for key, shown in reversed(self._works) if key == id(work)), "communication")

    def label(self, group: Any) -> str:
        """A group's name and ranks."""
        name = group.group_name
        if name not in self._labels:
            from torch.distributed import get_process_group_ranks

            words = group.group_desc.removesuffix("_GROUP").lower().replace("_", "-")
            ranks = describe_ranks(get_process_group_ranks(group))
            self._labels[name] = f"{'all ranks' if words == 'default-pg' else words} {ranks}"
        return self._labels[name]


def watch_collectives() -> None:
    """From here on this process's collectives are seen; once, and only where ``torch.distributed`` is imported."""
    if "torch.distributed" not in sys.modules:
        return
    from torch.distributed import ProcessGroup, Work

    if hasattr(Work.wait, "__megarl__"):
        return
    watch = CollectiveWatch()
    for method in (*_TOGETHER, *_BETWEEN_TWO):
        if hasattr(ProcessGroup, method):
            setattr(ProcessGroup, method, _counted(watch, method, getattr(ProcessGroup, method)))
    setattr(Work, "wait", _waited(watch, Work.wait))  # noqa: B010 -- a type of C++, whose methods have no setter


def _counted(watch: CollectiveWatch, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    name = _SHOWN.get(method, method)

    @functools.wraps(original)
    def begin(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not TRACER.active:
            return original(group, *args, **kwargs)
        shown = watch.issue(group, name, args)
        # Some wait inside, as a barrier that is monitored.
        work = _in_span(shown, functools.partial(original, group, *args, **kwargs))
        watch.under_way(work, shown)
        return work

    return begin


def _waited(watch: CollectiveWatch, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if not TRACER.active:
            return original(work, *args, **kwargs)
        return _in_span(watch.waits_for(work), functools.partial(original, work, *args, **kwargs))

    wait.__megarl__ = True  # type: ignore[attr-defined]
    return wait


def _in_span(shown: str, call: Callable[[], Any]) -> Any:
    """Calls, and keeps the span if it was long."""
    name = shown.partition(" ")[0]
    start = TRACER.enter(name, "communication", shown)
    try:
        return call()
    finally:
        TRACER.leave(name, "communication", start, {"of": shown}, SHORTEST_WAIT_NS)
        TRACER.waited_ns += time.monotonic_ns() - start
