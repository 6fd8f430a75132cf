"""Notices that a phase does not end, tells who waits for whom, and ends the run where it is asked to."""

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

from megarl.cluster.processes import RunProcesses
from megarl.cluster.stacks import kill_all, look_at
from megarl.config.tracing import WatchdogConfig
from megarl.errors import StallError
from megarl.tracing import PHASE, TRACER
from megarl.tracing.stall import explain, write_stall

STALLS = "stalls"
TICK_S = 1.0
ASLEEP_S = 5.0
"""A longer time between two looks means that the whole process was stopped, or the machine slept."""
GRACE_S = 30.0
"""For the main thread to leave what it does, before the process is ended where it stands."""
_NS = 1_000_000_000


class Limits:
    """How long each phase may take; a phase that was told of gets twice as long.

    Args:
        keys: of the configuration.
    """

    def __init__(self, keys: WatchdogConfig) -> None:
        self._default = keys.timeout_s
        self._by_phase: dict[str, float | None] = {name: _seconds(value) for name, value in keys.phases.items()}

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self._default is not None or any(value is not None for value in self._by_phase.values())

    def of(self, phase: str) -> float | None:
        """Seconds; None = no limit."""
        return self._by_phase.get(phase, self._default)

    def double(self, phase: str) -> None:
        """Twice as long from now on."""
        limit = self.of(phase)
        self._by_phase[phase] = None if limit is None else 2 * limit


class Watchdog:
    """A thread that looks at the phase under way; used as ``with``.

    Args:
        keys: of the configuration.
        folder: of the run's files.
        processes: to be looked at.
        message: tells the user some lines.

    Attributes:
        stall: why it ends the run; None while it does not.
    """

    def __init__(
        self, keys: WatchdogConfig, folder: Path, processes: RunProcesses, message: Callable[[str], None]
    ) -> None:
        self.keys = keys
        self.limits = Limits(keys)
        self.stall: StallError | None = None
        self._folder, self._processes, self._message = folder, processes, message
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        if self.limits.any:
            if self.keys.action == "end" and threading.current_thread() is threading.main_thread():
                self._before = signal.signal(signal.SIGUSR1, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None and self.stall is None:
            self._thread.join()
        if self._before is not None:
            signal.signal(signal.SIGUSR1, self._before)
        if self.stall is not None and error is not None:
            kill_all(self._processes)
            raise self.stall from None

    def _watch(self) -> None:
        """Looks until the run is over."""
        looked = resumed = time.monotonic_ns()
        while not self._over.wait(TICK_S):
            now = time.monotonic_ns()
            if now - looked > (TICK_S + ASLEEP_S) * _NS:
                resumed = now
            looked = now
            phases = [name for name, category, _ in list(TRACER.stack) if category == PHASE]
            limit = self.limits.of(phases[-1]) if phases else None
            seconds = (now - max(TRACER.moved_ns, resumed)) / _NS
            if limit is not None and seconds > limit:
                self._tell(phases[-1], seconds, limit)
                if self.stall is not None:
                    return self._end()
        return None

    def _tell(self, phase: str, seconds: float, limit: float) -> None:
        """Looks at all processes, writes down and tells what they do."""
        folder = self._folder / STALLS / time.strftime("%Y-%m-%d_%H-%M-%S")
        moved = TRACER.moved_ns
        try:
            seen = look_at(self._processes)
            text = explain(seen)
        except Exception as error:  # whatever is wrong with looking, the stall is told
            seen, text = [], f"the processes could not be looked at: {type(error).__name__}: {error}"
        if TRACER.moved_ns != moved or self._over.is_set():
            return  # it went on meanwhile
        head = f"{phase} has taken {seconds:.0f} s, its limit is {limit:g} s (trainer.watchdog)"
        summary = "\n".join([head, *(f"  {line}" for line in text.splitlines()), f"  stacks: {folder}"])
        write_stall(folder, summary, seen)
        self.limits.double(phase)
        if self.keys.action == "end":
            self.stall = StallError(summary)
        else:
            self._message(summary)

    def _end(self) -> None:
        """Has the main thread leave what it does; ends the process where it does not."""
        main = threading.main_thread().ident
        assert main is not None
        if self._before is not None:
            signal.pthread_kill(main, signal.SIGUSR1)
            if self._over.wait(GRACE_S):
                return
        kill_all(self._processes)
        print(f"the run ends here: its main thread could not be interrupted\n{self.stall}", file=sys.stderr, flush=True)
        os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """In the main thread; Ray's calls pass on this exception only."""
        if self.stall is not None:
            raise KeyboardInterrupt
        if callable(self._before):
            self._before(number, frame)
        elif self._before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
