"""What a run records of its processes: the timeline, profilers, and the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from megarl.cluster import PlacedPool
from megarl.cluster.processes import Member, Recorded, RunProcesses
from megarl.config.parts import RunConfig
from megarl.config.tracing import ProfilerConfig, TimelineConfig
from megarl.tracing import TRACER, Event, RoleProfile, TracingOptions, span, unwatch_process, watch_process
from megarl.tracing.clocks import Offset
from megarl.tracing.memory import count_memory
from megarl.tracing.trace_file import FILE_NAME, TraceFile
from megarl.tracing.tracer import left_out
from megarl.trainer.profiling import ProfiledSteps
from megarl.trainer.watchdog import Watchdog

TIMELINE = "timeline"
_NO_PROFILES: Mapping[str, RoleProfile] = MappingProxyType({})
DRIVER = 0
"""Number of the driver's row in the timeline; processes of roles follow."""


class Timeline:
    """Brings the events of all processes into one file, step by step.

    While a step runs, what the one before recorded is fetched, so that no process waits for it.

    Args:
        keys: what to record.
        folder: of the run's files.
        message: tells the user a line.
    """

    def __init__(self, keys: TimelineConfig, folder: Path, message: Callable[[str], None]) -> None:
        self.keys = keys
        self.file = TraceFile(folder / TIMELINE / FILE_NAME, time.monotonic_ns())
        self.file.name_process(DRIVER, "driver")
        self._message = message
        self._rows: dict[tuple[str, int], int] = {}
        self._offsets: dict[str, Offset] = {}
        self._asked: list[tuple[Member, Any]] = []
        self._on = False
        TRACER.recording = self.records(0)

    def records(self, step: int) -> bool:
        """Whether a step is recorded."""
        return not self.keys.steps or step in self.keys.steps

    def begin_step(self, processes: RunProcesses, step: int) -> None:
        """A step begins, and what was before it is over."""
        on = self.records(step)
        self._take_driver()
        with span("collect events", "timeline"):
            self._fetch(processes)
        if on or self._on:
            if on and not self._offsets:
                self._measure(processes)
            self._asked = processes.record(on)
        TRACER.recording = self._on = on
        if on:
            moment = Event("i", f"step {step}", "step", time.monotonic_ns(), 0, "", {})
            self.file.write(DRIVER, [moment])
            count_memory()

    def close(self, processes: RunProcesses | None) -> None:
        """Fetch what is left, where there are processes to ask, and complete the file.

        After a failure there are none: processes may be gone or hang, and what they had not handed over is lost.
        """
        TRACER.recording = False
        self._take_driver()
        if processes is not None:
            self._fetch(processes)
            if self._on:
                self._asked = processes.record(False)
                self._fetch(processes)
        elif self._on or self._asked:
            self.file.write(DRIVER, [left_out("what processes had not handed over when the run failed")])
        self.file.close()

    def _take_driver(self) -> None:
        count_memory()
        self.file.write(DRIVER, TRACER.take())
        self.file.flush()

    def _fetch(self, processes: RunProcesses) -> None:
        asked, self._asked = self._asked, []
        for recorded in processes.collect(asked):
            self._write(recorded)
        self.file.flush()

    def _write(self, recorded: Recorded) -> None:
        member = recorded.member
        row = self._rows.get((member.role, member.rank))
        if row is None:
            row = self._rows[member.role, member.rank] = len(self._rows) + 1
            self.file.name_process(row, f"{member.role} rank {member.rank}", f"{member.host}, pid {member.pid}")
        self.file.write(row, recorded.events, self._offsets.get(member.host, Offset()).ahead_ns)
        if recorded.missing:
            self.file.write(row, [left_out(recorded.missing)])
            self._message(
                f"timeline: {member.role} rank {member.rank} (pid {member.pid} on {member.host}) has not handed over "
                f"what it recorded: {recorded.missing}; the timeline is without it"
            )

    def _measure(self, processes: RunProcesses) -> None:
        """The nodes' clocks, which is told where one is not this machine's."""
        self._offsets = processes.offsets()
        for host, offset in self._offsets.items():
            if offset.error_ns:
                self._message(
                    f"timeline: the clock of {host} is {offset.ahead_ns / 1e6:+.3f} ms ahead of the driver's, "
                    f"to within {offset.error_ns / 1e6:.3f} ms; corrected"
                )


class RunTracing:
    """The parts that a run's configuration asks for, from before its processes start until they are gone.

    Args:
        config: the run's section of the configuration.
        folder: of the run's files.
        message: tells the user a line.
        pool: what the processes live on; they are watched if they start after this.
        profiles: what each role profiles.
        profiled: which steps are.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        message: Callable[[str], None],
        pool: PlacedPool,
        profiles: Mapping[str, RoleProfile] = _NO_PROFILES,
        profiled: ProfilerConfig | None = None,
    ) -> None:
        self.processes = pool.processes
        self._profiler = ProfiledSteps(profiled, self.processes, message) if profiles and profiled else None
        self._watchdog = Watchdog(config.watchdog, folder, self.processes, message)
        self.options = TracingOptions(self._watchdog.limits.any, config.timeline.enable, dict(profiles))
        self.processes.options = self.options
        self._timeline = Timeline(config.timeline, folder, message) if config.timeline.enable else None

    def __enter__(self) -> Self:
        if self.options.active:
            watch_process(self.options)
        self._watchdog.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._watchdog.__exit__(kind, error, trace)
            if self._profiler is not None and error is None:
                self._profiler.close()
        finally:
            if self._timeline is not None:
                self._timeline.close(self.processes if error is None else None)
            unwatch_process()

    def begin_step(self, step: int) -> None:
        """A step begins; 0 is what comes before the first."""
        if self._timeline is not None:
            self._timeline.begin_step(self.processes, step)
        if self._profiler is not None:
            self._profiler.begin_step(step)
