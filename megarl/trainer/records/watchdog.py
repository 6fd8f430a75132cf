"""Watchdog: detects a stalled phase, writes all stacks and the wait graph, and optionally ends the run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from megarl.base.errors import StallError
from megarl.cluster.processes import RunProcesses, collect_stacks, kill_processes
from megarl.config.schema.run import WatchdogConfig
from megarl.tracing import PHASE, TRACER
from megarl.tracing.stall import explain_stall, write_stall

STALLS = "stalls"
TICK_S = 1.0
ASLEEP_S = 5.0
"""A longer time between two ticks means that the process was stopped, or the machine slept."""
GRACE_S = 30.0
"""Time for the main thread to react to the interrupt, before the process is killed."""
_NS = 1_000_000_000


class PhaseLimits:
    """Time limit of each phase; a reported phase gets twice its limit.

    Args:
        keys: the section ``trainer.watchdog``.
    """

    def __init__(self, keys: WatchdogConfig) -> None:
        self._default = keys.timeout_s
        self._by_phase: dict[str, float | None] = {name: _seconds(value) for name, value in keys.phases.items()}

    @property
    def any(self) -> bool:
        """Whether any phase has a limit."""
        return self._default is not None or any(value is not None for value in self._by_phase.values())

    def of(self, phase: str) -> float | None:
        """Limit of a phase in seconds; None = no limit."""
        return self._by_phase.get(phase, self._default)

    def double(self, phase: str) -> None:
        """Double the limit of a phase."""
        limit = self.of(phase)
        self._by_phase[phase] = None if limit is None else 2 * limit


class Watchdog:
    """A thread that checks the duration of the current phase; a context manager.

    Args:
        keys: the section ``trainer.watchdog``.
        folder: of the run's files.
        processes: of the run.
        message: prints lines for the user.

    Attributes:
        stall: the error that ends the run; None without a stall.
    """

    def __init__(
        self, keys: WatchdogConfig, folder: Path, processes: RunProcesses, message: Callable[[str], None]
    ) -> None:
        self.keys = keys
        self.limits = PhaseLimits(keys)
        self.stall: StallError | None = None
        self._folder, self._processes, self._message = folder, processes, message
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        if self.limits.any:
            if self.keys.action == "end" and threading.current_thread() is threading.main_thread():
                self._previous_handler = signal.signal(signal.SIGUSR1, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._thread is not None and self.stall is None:
            self._thread.join()
        if self._previous_handler is not None:
            signal.signal(signal.SIGUSR1, self._previous_handler)
        if self.stall is not None and error is not None:
            kill_processes(self._processes)
            raise self.stall from None

    def _watch(self) -> None:
        checked = resumed = time.monotonic_ns()
        while not self._closed.wait(TICK_S):
            now = time.monotonic_ns()
            if now - checked > (TICK_S + ASLEEP_S) * _NS:
                resumed = now
            checked = now
            phases = [name for name, category, _ in list(TRACER.stack) if category == PHASE]
            limit = self.limits.of(phases[-1]) if phases else None
            seconds = (now - max(TRACER.moved_ns, resumed)) / _NS
            if limit is not None and seconds > limit:
                self._report(phases[-1], seconds, limit)
                if self.stall is not None:
                    return self._end()
        return None

    def _report(self, phase: str, seconds: float, limit: float) -> None:
        """Collect the stacks of all processes, and write and print the summary of the stall."""
        folder = self._folder / STALLS / time.strftime("%Y-%m-%d_%H-%M-%S")
        moved = TRACER.moved_ns
        try:
            stacks = collect_stacks(self._processes)
            text = explain_stall(stacks)
        except Exception as error:  # report the stall in any case
            stacks, text = [], f"the stacks of the processes could not be collected: {type(error).__name__}: {error}"
        if TRACER.moved_ns != moved or self._closed.is_set():
            return  # the phase moved on meanwhile
        head = f"{phase} has taken {seconds:.0f} s, its limit is {limit:g} s (trainer.watchdog)"
        summary = "\n".join([head, *(f"  {line}" for line in text.splitlines()), f"  stacks: {folder}"])
        write_stall(folder, summary, stacks)
        self.limits.double(phase)
        if self.keys.action == "end":
            self.stall = StallError(summary)
        else:
            self._message(summary)

    def _end(self) -> None:
        """Interrupt the main thread; kill the process if it does not react."""
        main = threading.main_thread().ident
        assert main is not None
        if self._previous_handler is not None:
            signal.pthread_kill(main, signal.SIGUSR1)
            if self._closed.wait(GRACE_S):
                return
        kill_processes(self._processes)
        print(f"the run ends here: its main thread could not be interrupted\n{self.stall}", file=sys.stderr, flush=True)
        os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise in the main thread; Ray's calls propagate this exception only."""
        if self.stall is not None:
            raise KeyboardInterrupt
        if callable(self._previous_handler):
            self._previous_handler(number, frame)
        elif self._previous_handler is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
