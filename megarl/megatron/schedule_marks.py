"""What Megatron's schedule tells of itself, as spans: each micro-batch's forward and backward, and gradient sums.

Megatron marks these by ``config.timers(name).start()`` and ``.stop()``, an interface that it leaves to its user.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from megarl.tracing import TRACER, span

_NAMES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-backward": "micro-batches",
    "all-grads-sync": "sum gradients",
}


class ScheduleTimers:
    """Stands where Megatron expects its timers; called with a name, it is that name's timer."""

    def __init__(self) -> None:
        self._timers: dict[str, ScheduleTimer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> ScheduleTimer:
        """The timer of a name; ``log_level`` is not read."""
        return self._timers.setdefault(name, ScheduleTimer(_NAMES.get(name, name)))


class ScheduleTimer:
    """One name's spans; may nest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[AbstractContextManager[None]] = []
        self._count = 0

    def start(self, barrier: bool = False) -> None:
        """A span begins; no barrier, which would change what is measured."""
        one = span(self._name, "compute", number=self._count)
        self._count += 1
        one.__enter__()
        self._open.append(one)

    def stop(self, barrier: bool = False) -> None:
        """The span begun last ends."""
        if self._open:
            self._open.pop().__exit__(None, None, None)


def schedule_timers() -> Any:
    """New timers, which count from 0; None while nobody looks, so that Megatron does not ask them."""
    return ScheduleTimers() if TRACER.active else None
