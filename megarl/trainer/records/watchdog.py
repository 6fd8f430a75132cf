"""Watchdog: detects a stalled phase, writes all stacks and the wait graph, and optionally ends the run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from megarl.base.errors import StallError
from megarl.base.signals import interruptible, request_interrupt, withdraw_interrupt
from megarl.base.timeouts import REPORT_S
from megarl.cluster.processes import RunProcesses, collect_stacks, kill_processes
from megarl.config.schema.jobs import GenerationJobConfig, JobConfig, TrainConfig
from megarl.config.schema.run import CollectivesConfig, WatchdogConfig
from megarl.tracing import PHASE, TRACER
from megarl.tracing.stall import explain_stall, write_stall

STALLS = "stalls"
TICK_S = 1.0
ASLEEP_S = 5.0
"""A longer time between two ticks means that the process was stopped, or the machine slept."""
GRACE_S = 30.0
"""Time for the main thread to react to the interrupt, before the process is killed."""
HISTORY_FACTOR = 2.0
"""A phase may take this many times its longest time so far, if that is before a collective fails."""
LEAST_FACTOR = 1.25
"""The same for phases that take longer than a collective may."""
RECOVERY_S = 10.0
"""Seconds for the driver to notice and record that a replica is lost."""
_NS = 1_000_000_000


@dataclass(frozen=True)
class LaterLimits:
    """Other time limits in a run, which bound the watchdog's limits.

    Attributes:
        collective_s: ``trainer.nccl_timeout``, after which a collective ends its workers.
        recovery_s: seconds by phase after which the run itself replaces a silent replica.
    """

    collective_s: float = 1800.0
    recovery_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: JobConfig) -> LaterLimits:
        """Read the limits of a job."""
        recovery = {}
        if isinstance(config, GenerationJobConfig):
            rollout = config.actor_rollout_ref.rollout
            recovery = dict.fromkeys(("gen", "testing"), rollout.health.timeout_s)
            if isinstance(config, TrainConfig):
                calls = rollout.engine_kwargs.sglang.call_timeout_s if rollout.name == "sglang" else 0.0
                recovery["update_weights"] = max(config.sync.timeout_s, calls)
        if isinstance(config.trainer, CollectivesConfig):
            return cls(config.trainer.nccl_timeout, recovery)
        return cls(recovery_s=recovery)


NO_OTHERS = LaterLimits()


class PhaseLimits:
    """Seconds that each phase may be without progress, until it is reported, and until the run ends.

    A phase without a limit of its own (``trainer.watchdog.phases``) is reported after ``timeout_s``, or after twice its
    longest time so far, but before a collective fails; a reported phase gets twice its limit. The run ends at the same
    time, with two exceptions: a phase that has not completed yet may compile or load until shortly before a collective
    fails, and a silent replica is replaced first.
    """

    def __init__(self, keys: WatchdogConfig, later: LaterLimits = NO_OTHERS) -> None:
        self._default = keys.timeout_s
        self._by_phase: dict[str, float | None] = {name: _seconds(value) for name, value in keys.phases.items()}
        self._latest_s, self._recovery_s = later.collective_s - REPORT_S, later.recovery_s
        self._longest: dict[str, float] = {}
        self._doubled: dict[str, float] = {}

    @property
    def any(self) -> bool:
        """Whether any phase has a limit."""
        return self._default is not None or any(value is not None for value in self._by_phase.values())

    def of(self, phase: str) -> float | None:
        """Return the seconds without progress until a phase is reported; None = no limit."""
        limit = self._usual(phase)
        return None if limit is None else max(limit, self._doubled.get(phase, 0.0))

    def end_of(self, phase: str, completed: bool) -> float | None:
        """Return the seconds without progress until the run ends; None = no limit."""
        limit = self._usual(phase)
        if limit is None or phase in self._by_phase:
            return limit
        end = limit if completed else max(limit, self._latest_s)
        return end if phase not in self._recovery_s else max(end, limit + self._recovery_s[phase] + RECOVERY_S)

    def _usual(self, phase: str) -> float | None:
        """Limit of a phase that was not reported before."""
        limit = self._by_phase.get(phase, self._default)
        if limit is None or phase in self._by_phase:
            return limit
        longest = self._longest.get(phase, 0.0)
        return max(limit, min(HISTORY_FACTOR * longest, self._latest_s), LEAST_FACTOR * longest)

    def observe(self, phase: str, seconds: float) -> None:
        """Record a time without progress after which a phase went on."""
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    def double(self, phase: str) -> None:
        """Double the limit of a phase."""
        limit = self.of(phase)
        if limit is not None:
            self._doubled[phase] = 2 * limit


class Watchdog:
    """A thread that checks the duration of the current phase; a context manager.

    Attributes:
        stall: the error that ends the run; None without a stall.
    """

    def __init__(
        self,
        keys: WatchdogConfig,
        folder: Path,
        processes: RunProcesses,
        message: Callable[[str], None],
        later: LaterLimits = NO_OTHERS,
    ) -> None:
        self.keys = keys
        self.limits = PhaseLimits(keys, later)
        self.stall: StallError | None = None
        self._folder, self._processes, self._message = folder, processes, message
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._scope = contextlib.ExitStack()
        self._can_interrupt = False

    def __enter__(self) -> Self:
        TRACER.completed.clear()
        if self.limits.any:
            if self.keys.action == "end" and threading.current_thread() is threading.main_thread():
                self._scope.enter_context(interruptible())
                self._can_interrupt = True
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closed.set()
        if self._thread is not None and self.stall is None:
            self._thread.join()
        if self.stall is not None:
            withdraw_interrupt()
        self._scope.close()
        if self.stall is not None and error is not None:
            kill_processes(self._processes)
            raise self.stall from None

    def _watch(self) -> None:
        checked = resumed = time.monotonic_ns()
        moved, phase, seconds = TRACER.moved_ns, "", 0.0
        while not self._closed.wait(TICK_S):
            now = time.monotonic_ns()
            if now - checked > (TICK_S + ASLEEP_S) * _NS:
                resumed = now
            checked = now
            if TRACER.moved_ns != moved and phase:
                self.limits.observe(phase, seconds)
            moved = TRACER.moved_ns
            phase = next((name for name, category, _ in reversed(list(TRACER.stack)) if category == PHASE), "")
            seconds = (now - max(moved, resumed)) / _NS
            limit, end = self.limits.of(phase) if phase else None, None
            if limit is not None and self.keys.action == "end":
                end = self.limits.end_of(phase, phase in TRACER.completed)
            if limit is not None and seconds > min(limit, end or limit):
                self._report(phase, seconds, limit, end)
                if self.stall is not None:
                    return self._end()
        return None

    def _report(self, phase: str, seconds: float, limit: float, end: float | None) -> None:
        """Collect the stacks of all processes, and write and print the summary of the stall.

        Args:
            end: seconds after which the run ends; None = it continues.
        """
        folder = self._folder / STALLS / time.strftime("%Y-%m-%d_%H-%M-%S")
        moved = TRACER.moved_ns
        try:
            began = time.monotonic()
            stacks = collect_stacks(self._processes)
            text = explain_stall(stacks, time.monotonic() - began)
        except Exception as error:  # report the stall in any case
            stacks, text = [], f"the stacks of the processes could not be collected: {type(error).__name__}: {error}"
        if TRACER.moved_ns != moved or self._closed.is_set():
            return  # the phase moved on meanwhile
        ends = end is not None and seconds > end
        head = f"{phase} has taken {seconds:.0f} s, its limit is {end if ends else limit:g} s (trainer.watchdog)"
        tail = [] if ends or end is None else [f"  the run ends after {end:g} s, unless {phase} goes on before"]
        summary = "\n".join([head, *(f"  {line}" for line in text.splitlines()), *tail, f"  stacks: {folder}"])
        write_stall(folder, summary, stacks)
        self.limits.double(phase)
        if ends:
            self.stall = StallError(summary, code="worker.phase-stalled")
        else:
            self._message(summary)

    def _end(self) -> None:
        """Interrupt the main thread; kill the process if it does not react."""
        if self._can_interrupt:
            request_interrupt()
            if self._closed.wait(GRACE_S):
                return
        kill_processes(self._processes)
        print(f"the run ends here: its main thread could not be interrupted\n{self.stall}", file=sys.stderr, flush=True)
        os._exit(1)


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
