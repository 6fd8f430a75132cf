"""Tracing of a run's processes: the timeline of all processes, profilers of chosen steps, and the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from megarl.base.errors import ConfigError
from megarl.cluster.processes import Member, Recorded, RunProcesses
from megarl.cluster.resources import PlacedPool
from megarl.config.checks.run import needs_cuda
from megarl.config.schema.jobs import TrainConfig
from megarl.config.schema.run import ProfilerConfig, RoleProfilerConfig, RunConfig, TimelineConfig, ToolConfig
from megarl.tracing import (
    TRACER,
    Event,
    ProfileOptions,
    RoleProfile,
    TracingOptions,
    span,
    unwatch_process,
    watch_process,
)
from megarl.tracing.trace_file import TRACE_FILE, OffsetEstimate, TraceFile
from megarl.tracing.tracer import count_memory, missing_events
from megarl.trainer.records.watchdog import NO_OTHERS, LaterLimits, Watchdog

TIMELINE = "timeline"
DRIVER = 0
"""Row of the driver in the timeline; the processes of the roles follow."""
PROFILES = "profile"
ROLES = {"actor_rollout_ref.actor": "actor", "actor_rollout_ref.ref": "reference", "critic": "critic"}
"""Process roles by config path."""
NSIGHT = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "kill": "none",
}
"""Default options of ``nsys profile``; :class:`~megarl.tracing.profilers.NsysRanges` sets the capture ranges."""
_NO_PROFILES: Mapping[str, RoleProfile] = MappingProxyType({})


class Timeline:
    """Collects the events of all processes in one trace file, step by step.

    The events of a step are fetched during the next step, so that no process waits for them.
    """

    def __init__(self, keys: TimelineConfig, folder: Path, message: Callable[[str], None]) -> None:
        self.keys = keys
        self.file = TraceFile(folder / TIMELINE / TRACE_FILE, time.monotonic_ns())
        self.file.name_process(DRIVER, "driver")
        self._message = message
        self._rows: dict[tuple[str, int], int] = {}
        self._offsets: dict[str, OffsetEstimate] = {}
        self._pending: list[tuple[Member, Any]] = []
        self._on = False
        TRACER.recording = self.records(0)

    def records(self, step: int) -> bool:
        """Return whether a step is recorded."""
        return not self.keys.steps or step in self.keys.steps

    def begin_step(self, processes: RunProcesses, step: int) -> None:
        """Collect the events of the step before, and record this step if configured."""
        on = self.records(step)
        self._take_driver()
        with span("collect events", "timeline"):
            self._fetch(processes)
        if on or self._on:
            if on and not self._offsets:
                self._measure(processes)
            self._pending = processes.record(on)
        TRACER.recording = self._on = on
        if on:
            moment = Event("i", f"step {step}", "step", time.monotonic_ns(), 0, "", {})
            self.file.write(DRIVER, [moment])
            count_memory()

    def close(self, processes: RunProcesses | None) -> None:
        """Fetch the remaining events and complete the file.

        Args:
            processes: of the run; None after a failure, when processes may be gone or hang. Their last events are lost.
        """
        TRACER.recording = False
        self._take_driver()
        if processes is not None:
            self._fetch(processes)
            if self._on:
                self._pending = processes.record(False)
                self._fetch(processes)
        elif self._on or self._pending:
            self.file.write(
                DRIVER, [missing_events("events of processes that were not collected before the run failed")]
            )
        self.file.close()

    def _take_driver(self) -> None:
        count_memory()
        self.file.write(DRIVER, TRACER.take())
        self.file.flush()

    def _fetch(self, processes: RunProcesses) -> None:
        pending, self._pending = self._pending, []
        for recorded in processes.collect(pending):
            self._write(recorded)
        self.file.flush()

    def _write(self, recorded: Recorded) -> None:
        member = recorded.member
        row = self._rows.get((member.role, member.rank))
        if row is None:
            row = self._rows[member.role, member.rank] = len(self._rows) + 1
            self.file.name_process(row, f"{member.role} rank {member.rank}", f"{member.host}, pid {member.pid}")
        self.file.write(row, recorded.events, self._offsets.get(member.host, OffsetEstimate()).ahead_ns)
        if recorded.missing:
            self.file.write(row, [missing_events(recorded.missing)])
            self._message(
                f"timeline: no events of {member.role} rank {member.rank} (pid {member.pid} on {member.host}): "
                f"{recorded.missing}; the timeline lacks them"
            )

    def _measure(self, processes: RunProcesses) -> None:
        """Measure the clock offsets of the nodes, and report those of other machines."""
        self._offsets = processes.offsets()
        for host, offset in self._offsets.items():
            if offset.error_ns:
                self._message(
                    f"timeline: the clock of {host} is {offset.ahead_ns / 1e6:+.3f} ms ahead of the driver's, "
                    f"to within {offset.error_ns / 1e6:.3f} ms; corrected"
                )


def role_profiles(config: TrainConfig, folder: Path, device: str) -> dict[str, RoleProfile]:
    """Build the profiler options of each role; empty if no step is profiled.

    Raises:
        ConfigError: the tool needs CUDA, and the run is on CPU.
    """
    keys = config.global_profiler
    if keys.tool is None or not keys.steps:
        return {}
    if keys.tool != "torch" and device == "cpu":
        raise ConfigError(f"global_profiler.tool={keys.tool}: {needs_cuda(keys.tool)}", code="timeline.needs-cuda")
    options = _profile_options(keys, Path(keys.save_path or folder / PROFILES).absolute())
    chosen = {ROLES[path]: _ranks(profiler) for path, profiler in config.role_profilers.items()}
    return {role: RoleProfile(options, ranks) for role, ranks in chosen.items() if ranks is not None}


def _ranks(profiler: RoleProfilerConfig) -> tuple[int, ...] | None:
    """Profiled ranks of a role, () for all; None if the role is not profiled."""
    if not profiler.enable:
        return None
    return () if profiler.all_ranks else tuple(profiler.ranks)


def _profile_options(keys: ProfilerConfig, folder: Path) -> ProfileOptions:
    tools: ToolConfig = keys.global_tool_config
    return ProfileOptions(
        tool=str(keys.tool),
        folder=str(folder),
        discrete=(tools.torch.discrete and keys.tool == "torch") or (tools.nsys.discrete and keys.tool == "nsys"),
        contents=tuple(tools.torch.contents),
        max_entries=tools.torch_memory.trace_alloc_max_entries,
        nsight=NSIGHT | {name: str(value) for name, value in tools.nsys.worker_nsight_options.items()},
    )


class _ProfiledSteps:
    """Starts and stops the profilers of the processes for the chosen steps."""

    def __init__(self, keys: ProfilerConfig, processes: RunProcesses, message: Callable[[str], None]) -> None:
        self._steps = set(keys.steps or ())
        self._share_file = keys.profile_continuous_steps
        self._processes, self._message = processes, message
        self._label = ""
        self._pending: list[Any] = []

    def begin_step(self, step: int) -> None:
        """Begin a step: start or stop the profilers.

        Raises:
            WorkerError: a profiler failed.
        """
        if step == 0:
            self._report_missing_ranks()
        label = self.label(step)
        if label != self._label:
            self._wait()
            self._label = label
            self._pending = self._processes.profile(label)

    def label(self, step: int) -> str:
        """Name of a step's file, shared by consecutive steps if configured; empty for a step without a profile."""
        if step not in self._steps:
            return ""
        first = step
        while self._share_file and first - 1 in self._steps:
            first -= 1
        return f"step{first}"

    def close(self) -> None:
        """Stop the profilers, and wait until all files are written."""
        self.begin_step(-1)
        self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        self._processes.wait(pending)

    def _report_missing_ranks(self) -> None:
        ranks = {(member.role, member.rank) for member in self._processes.members()}
        for role, profile in self._processes.options.profiles.items():
            missing = [rank for rank in profile.ranks if (role, rank) not in ranks]
            if missing:
                self._message(
                    f"global_profiler: {role} has no rank {', '.join(map(str, missing))}, which is not profiled"
                )


class RunTracing:
    """Timeline, profilers and watchdog of a run, from before its processes start until they are gone.

    Args:
        pool: devices of the processes; processes that start later are traced.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        message: Callable[[str], None],
        pool: PlacedPool,
        profiles: Mapping[str, RoleProfile] = _NO_PROFILES,
        profiled: ProfilerConfig | None = None,
        later: LaterLimits = NO_OTHERS,
    ) -> None:
        self.processes = pool.processes
        self._profiler = _ProfiledSteps(profiled, self.processes, message) if profiles and profiled else None
        self._watchdog = Watchdog(config.watchdog, folder, self.processes, message, later)
        self.options = TracingOptions(self._watchdog.limits.any, config.timeline.enable, dict(profiles))
        self.processes.options = self.options
        self._timeline = Timeline(config.timeline, folder, message) if config.timeline.enable else None

    def __enter__(self) -> Self:
        if self.options.active:
            watch_process(self.options)
        self._watchdog.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._watchdog.__exit__(kind, error, trace)
            if self._profiler is not None and error is None:
                self._profiler.close()
        finally:
            if self._timeline is not None:
                self._timeline.close(self.processes if error is None else None)
            unwatch_process()

    @property
    def is_stalled(self) -> bool:
        """Whether the watchdog ends the run."""
        return self._watchdog.stall is not None

    def begin_step(self, step: int) -> None:
        """Begin a step; 0 = everything before the first step."""
        if self._timeline is not None:
            self._timeline.begin_step(self.processes, step)
        if self._profiler is not None:
            self._profiler.begin_step(step)
