"""What is recorded of a run's processes: the timeline, the watchdog, profilers."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import key, section

PHASES = (
    *("start_workers", "step", "gen", "reward", "old_log_prob", "ref", "repr_align", "values", "adv"),
    *("update_critic", "update_actor", "update_weights", "update", "testing", "save_checkpoint"),
)
"""Phases of a run that can have a limit; ``step`` is what is between a step's others."""


@dataclass
class TimelineConfig:
    """Every phase on every process, for https://ui.perfetto.dev."""

    enable: bool = key(False, "Write `timeline/trace.json` to the run's folder; see docs/tracing.md.")
    steps: list[int] = key([], "Steps to record, 0 being the start and the validation before training; [] = all.")


@dataclass
class WatchdogConfig:
    """What happens when a phase does not end."""

    timeout_s: float | None = key(
        540.0,
        "Seconds that a phase may take before it is told who waits for whom; null = as long as it takes. The default "
        "is just below the 600 s after which collectives fail by themselves.",
        above=0,
    )
    phases: dict[str, Any] = key(
        {}, "Seconds by phase, such as `{gen: 3600}`, in place of `timeout_s`; null = no limit."
    )
    action: str = key(
        "tell",
        "Tell and go on, with twice the limit for that phase from then on, or end the run with its processes.",
        choices=("tell", "end"),
    )


@dataclass
class RoleProfilerConfig:
    """Which of a role's processes run under `global_profiler.tool`."""

    enable: bool = key(False, "Profile this role.")
    all_ranks: bool = key(False, "All its ranks, instead of `ranks`.")
    ranks: list[int] = key([], "Its ranks to profile; read without `all_ranks`.", at_least=0)


@dataclass
class TorchToolConfig:
    """What `tool: torch` records."""

    contents: list[str] = key(
        ["cpu", "cuda"], "What is recorded.", choices=("cpu", "cuda", "memory", "shapes", "stack")
    )
    discrete: bool = key(False, "A file per verb, instead of one per step.")


@dataclass
class MemoryToolConfig:
    """What `tool: torch_memory` records."""

    trace_alloc_max_entries: int = key(100_000, "Allocations that are remembered, the latest.", at_least=1)


@dataclass
class NsysToolConfig:
    """How `tool: nsys` runs."""

    discrete: bool = key(False, "A capture per verb, instead of one per step.")
    worker_nsight_options: dict[str, Any] = key(
        {}, "Options of `nsys profile`, by their names, which replace those of megarl's own (see docs/tracing.md)."
    )


@dataclass
class ToolConfig:
    """Settings of each tool."""

    torch: TorchToolConfig = section(TorchToolConfig)
    torch_memory: MemoryToolConfig = section(MemoryToolConfig)
    nsys: NsysToolConfig = section(NsysToolConfig)


@dataclass
class ProfilerConfig:
    """A profiler for chosen steps, roles and ranks; a role takes part by its `profiler` section."""

    tool: str | None = key(
        None,
        "torch: operators, as a trace; torch_memory: allocations of CUDA's memory, as a snapshot; nsys: processes run "
        "under `nsys profile`; null = none.",
        choices=("torch", "torch_memory", "nsys"),
    )
    steps: list[int] | None = key(None, "Training steps to profile.", at_least=1)
    profile_continuous_steps: bool = key(False, "One file for steps that follow each other, instead of one per step.")
    save_path: str | None = key(
        None, "Folder of the files, on each process's own node; null = `profile` in the run's folder."
    )
    global_tool_config: ToolConfig = section(ToolConfig)
