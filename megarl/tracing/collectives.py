"""Instrumentation of ``torch.distributed``: the board shows the current collective and the counts per group.

All collectives go through methods of ``ProcessGroup``, and all waits through ``Work.wait``, so these are wrapped. The
ranks of a group issue its collectives in the same order. So the rank with the lowest count is the one that the others
wait for. This holds for NCCL too, where a process continues after it issues a collective.

PyTorch's Flight Recorder covers NCCL only and is read after an abort. The wrappers cover gloo as well, and their counts
are readable while the process hangs.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from megarl.tracing.board import describe_ranks
from megarl.tracing.tracer import TRACER

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    "reduce_scatter_tensor_coalesced",
)
_POINT_TO_POINT = ("send", "recv", "recv_anysource")
SHORTEST_WAIT_NS = 50_000
"""Shorter waits are omitted from the timeline."""
_MOST_PENDING = 64
_SHOWN = {
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "_reduce_scatter_base": "reduce_scatter",
}


class _CollectiveWatch:
    """Counts collectives by group, and maps each wait to its collective."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = defaultdict(int)
        self._labels: dict[str, str] = {}
        self.works: deque[tuple[int, str]] = deque(maxlen=_MOST_PENDING)

    def issue(self, group: Any, name: str, args: tuple[Any, ...]) -> str:
        """Count a call; return its description."""
        label = self.label(group)
        if name in _POINT_TO_POINT:
            peer = f" {args[1]}" if name != "recv_anysource" and len(args) > 1 else ""
            return f"{name}{peer} of {label}"
        self._counts[label] += 1
        if TRACER.board is not None:
            TRACER.board.issue(label, name, self._counts[label])
        return f"{name} #{self._counts[label]} of {label}"

    def label(self, group: Any) -> str:
        """Return name and ranks of a group."""
        name = group.group_name
        if name not in self._labels:
            from torch.distributed import get_process_group_ranks

            words = group.group_desc.removesuffix("_GROUP").lower().replace("_", "-")
            ranks = describe_ranks(get_process_group_ranks(group))
            self._labels[name] = f"{'all ranks' if words == 'default-pg' else words} {ranks}"
        return self._labels[name]


def watch_collectives() -> None:
    """Instrument the collectives of this process, once; a no-op if ``torch.distributed`` is not imported."""
    if "torch.distributed" not in sys.modules:
        return
    from torch.distributed import ProcessGroup, Work

    if hasattr(Work.wait, "__megarl__"):
        return
    watch = _CollectiveWatch()
    for method in (*_COLLECTIVES, *_POINT_TO_POINT):
        if hasattr(ProcessGroup, method):
            setattr(ProcessGroup, method, _counted(watch, method, getattr(ProcessGroup, method)))
    setattr(Work, "wait", _waited(watch, Work.wait))  # noqa: B010 -- a C++ type without attribute setters


def _counted(watch: _CollectiveWatch, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    name = _SHOWN.get(method, method)

    @functools.wraps(original)
    def begin(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not TRACER.active:
            return original(group, *args, **kwargs)
        shown = watch.issue(group, name, args)
        # Some calls wait inside, such as monitored_barrier.
        work = _in_span(shown, functools.partial(original, group, *args, **kwargs))
        watch.works.append((id(work), shown))
        return work

    return begin


def _waited(watch: _CollectiveWatch, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if not TRACER.active:
            return original(work, *args, **kwargs)
        shown = next((shown for key, shown in reversed(watch.works) if key == id(work)), "communication")
        return _in_span(shown, functools.partial(original, work, *args, **kwargs))

    wait.__megarl__ = True  # type: ignore[attr-defined]
    return wait


def _in_span(shown: str, call: Callable[[], Any]) -> Any:
    """Make a call within a span; short spans are dropped."""
    name = shown.partition(" ")[0]
    start = TRACER.enter(name, "communication", shown)
    try:
        return call()
    finally:
        TRACER.leave(name, "communication", start, {"of": shown}, SHORTEST_WAIT_NS)
        TRACER.waited_ns += time.monotonic_ns() - start
