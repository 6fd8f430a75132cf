"""The `trainer` section of every job, with timeline and watchdog, and the profilers."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import REQUIRED, derived_key, key, section
from megarl.config.schema.model import CheckpointConfig

PHASES = (
    *("start_workers", "step", "gen", "reward", "old_log_prob", "ref", "teacher", "repr_align", "values", "adv"),
    *("update_critic", "update_actor", "update_weights", "update", "testing", "save_checkpoint"),
)
"""Phases of a run with a watchdog limit; ``step`` is the time of a step outside its other phases."""


@dataclass(frozen=True)
class TimelineConfig:
    """Timeline of every phase on every process, for https://ui.perfetto.dev."""

    enable: bool = key(False, "Write `timeline/trace.json` to the run's folder; see docs/how_to/tracing.md.")
    steps: list[int] = key([], "Steps to record; 0 = start and validation before training; [] = all.")


@dataclass(frozen=True)
class WatchdogConfig:
    """Watchdog for phases that do not end."""

    timeout_s: float | None = key(
        240.0,
        "Seconds a phase may be without progress before the watchdog reports which process waits for which, or twice "
        "its longest time so far in this run; null = no limit. At least 60 s below `trainer.nccl_timeout`.",
        above=0,
    )
    phases: dict[str, Any] = key({}, "Seconds by phase, such as `{gen: 3600}`, replacing `timeout_s`; null = no limit.")
    action: str = key(
        "tell",
        "tell = report, continue, and double the limit of that phase; end = end the run with its processes, a phase "
        "that has not completed yet shortly before `trainer.nccl_timeout` (see "
        "docs/how_to/debugging.md#time-limits).",
        choices=("tell", "end"),
    )


@dataclass(frozen=True)
class HubConfig:
    """Downloads from the Hugging Face Hub before a run; see docs/how_to/data.md."""

    enable: bool = key(
        True,
        "Download models named `owner/name` (or `owner/name@revision`), unless such a folder exists here, and data "
        "files named `hf://datasets/owner/name/file`; false = nothing is downloaded.",
    )
    cache_dir: str | None = derived_key(
        "Folder of the downloads, which all nodes must see; auto = Hugging Face's cache (`HF_HOME`)."
    )


@dataclass(frozen=True)
class RoleProfilerConfig:
    """Ranks of a role that run under `global_profiler.tool`."""

    enable: bool = key(False, "Profile this role.")
    all_ranks: bool = key(False, "Profile all its ranks, instead of `ranks`.")
    ranks: list[int] = key([], "Ranks to profile; read without `all_ranks`.", at_least=0)


@dataclass(frozen=True)
class TorchToolConfig:
    """Settings of `tool: torch`."""

    contents: list[str] = key(["cpu", "cuda"], "Data to record.", choices=("cpu", "cuda", "memory", "shapes", "stack"))
    discrete: bool = key(False, "Write a file per verb, instead of one per step.")


@dataclass(frozen=True)
class MemoryToolConfig:
    """Settings of `tool: torch_memory`."""

    trace_alloc_max_entries: int = key(100_000, "Allocations to keep, the latest ones.", at_least=1)


@dataclass(frozen=True)
class NsysToolConfig:
    """Settings of `tool: nsys`."""

    discrete: bool = key(False, "Capture per verb, instead of once per step.")
    worker_nsight_options: dict[str, Any] = key(
        {}, "Options of `nsys profile` by name; they replace megarl's (see docs/how_to/tracing.md)."
    )


@dataclass(frozen=True)
class ToolConfig:
    """Settings of each profiler."""

    torch: TorchToolConfig = section(TorchToolConfig)
    torch_memory: MemoryToolConfig = section(MemoryToolConfig)
    nsys: NsysToolConfig = section(NsysToolConfig)


@dataclass(frozen=True)
class ProfilerConfig:
    """Profiler for selected steps, roles and ranks; a role takes part through its `profiler` section."""

    tool: str | None = key(
        None,
        "torch: operators, as a trace; torch_memory: allocations of CUDA memory, as a snapshot; nsys: processes run "
        "under `nsys profile`; null = none.",
        choices=("torch", "torch_memory", "nsys"),
    )
    steps: list[int] | None = key(None, "Training steps to profile; null = none.", at_least=1)
    profile_continuous_steps: bool = key(False, "Write one file for consecutive steps, instead of one per step.")
    save_path: str | None = derived_key(
        "Folder of the files, on the node of each process; auto = `profile` in the run's folder."
    )
    global_tool_config: ToolConfig = section(ToolConfig)


@dataclass(frozen=True)
class RunConfig:
    """Name, devices and records of a run."""

    project_name: str = key("megarl", "Project of the run in trackers.")
    experiment_name: str = key(REQUIRED, "Name of the run; its files go to `outputs/<experiment_name>/<time>`.")
    logger: list[str] = key(
        ["console", "jsonl"],
        "Trackers for metrics, any number of them; see docs/how_to/watching.md.",
        choices=("console", "jsonl", "mlflow", "swanlab", "tensorboard", "wandb"),
        custom="class",
    )
    tracker_timeout_s: float = key(
        60.0,
        "Seconds that a tracker in a separate process (wandb, swanlab, mlflow, custom) may take for a call, and to "
        "send the rest when the run ends; then megarl drops the tracker, and the run continues.",
        above=0,
    )
    log_level: str = key(
        "INFO",
        "Level of the files in `logs/` of the run's folder: `driver.log`, and one per role and rank.",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
    )
    private_files: bool = key(
        True,
        "Only this user can read the files of the run, checkpoints and export included (modes 0600 and 0700); false = "
        "the modes follow the umask of the shell.",
    )
    quiet: bool = key(False, "Print only warnings, errors and the closing summary; `--quiet` sets it.")
    nnodes: int = key(1, "Number of nodes.", at_least=1)
    n_gpus_per_node: int = key(8, "Devices per node: GPUs, or process slots if `device` is cpu.", at_least=1)
    device: str = key("auto", "Device type; auto = CUDA if the cluster has a GPU.", choices=("auto", "cpu", "cuda"))
    ray_dashboard: bool = key(
        False,
        "Serve Ray's dashboard, for this machine only (needs `ray[default]`); read if the run starts Ray itself: a "
        "cluster of `megarl launch` has one.",
    )
    sweep_metric: str | None = derived_key(
        "Metric that a sweep compares runs by, at its last value; auto = mean of the last validation, or without one "
        "the score or the loss (see docs/how_to/sweeps.md).",
    )
    overwrite_output: bool = key(
        False,
        "Replace the work of another run in the folders and files that this run writes: checkpoints (at the first "
        "save), export, responses, answers; false = such work is an error before the run starts (see "
        "docs/how_to/checkpoints.md#folders-of-other-runs).",
    )
    seed: int = key(1, "Seed of the run; the default of all other seeds.", at_least=0)
    timeline: TimelineConfig = section(TimelineConfig)
    watchdog: WatchdogConfig = section(WatchdogConfig)

    @property
    def num_devices(self) -> int:
        """Devices of the whole pool."""
        return self.nnodes * self.n_gpus_per_node


@dataclass(frozen=True)
class CollectivesConfig:
    """Process groups of the Megatron roles."""

    nccl_timeout: int = key(
        1800,
        "Seconds after which an incomplete collective ends a worker, and so the run (NCCL and gloo, all roles). "
        "Processes that end are detected at once; this limit is for those that hang.",
        at_least=1,
    )
    repeat_out_of_memory: bool = key(
        True,
        "After an out-of-memory error of the device in a pass of a Megatron role, halve its micro-batches on all ranks "
        "and repeat the pass with the same result; false = the run ends. See docs/how_to/performance.md#out-of-memory.",
    )


@dataclass(frozen=True)
class TrainingRunConfig(CollectivesConfig, RunConfig):
    """Length, devices, checkpoints and records of a training run."""

    logging_freq: int = key(
        1,
        "Steps between records in the trackers other than jsonl, the console included. Validations and the last step "
        "are always recorded. A record has the metrics of its step, not their mean.",
        at_least=1,
    )
    total_epochs: int = key(1, "Passes over the training data.", at_least=1)
    total_training_steps: int | None = derived_key(
        "Training steps, instead of `total_epochs`; auto = the steps of the epochs.", at_least=1
    )
    hf_export_dir: str | None = key(
        None,
        "Folder for the final model in Hugging Face format; null = none.",
    )
    save_freq: int = key(
        -1, "Steps between checkpoints; the last step is saved too; -1 = never save.", at_least=1, allowed=(-1,)
    )
    resume_mode: str = key(
        "auto",
        "auto: continue from the newest checkpoint in `default_local_dir`, or start from scratch without one; must: "
        "stop without one; disable: start from scratch; resume_path: continue from `resume_from_path`.",
        choices=("auto", "must", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(
        None, "Checkpoint folder to continue from, with `resume_mode: resume_path`; null = none."
    )
    default_local_dir: str | None = derived_key(
        "Folder of the checkpoints; auto = `outputs/<experiment_name>/checkpoints`."
    )
    max_wall_seconds: float | None = key(
        None,
        "Wall-clock limit of the run, in seconds from its start: it saves and ends in time, with exit status 0, after "
        "the last step that fits; null = only the deadline of the scheduler (see docs/how_to/checkpoints.md).",
        above=0,
    )
    hardware: str | None = derived_key(
        "Node type for `megarl plan` and the dry run: a name, such as h100, or a user file (see docs/how_to/plan.md); "
        "auto = h100, or cpu if `device` is cpu.",
    )
    dry_run: bool = key(
        False,
        "Check everything except the model's computation, then end (see docs/how_to/dry_run.md): models, layouts, "
        "data, rewards, memory, resharding, checkpoints, trackers. Needs no GPU, no Ray, and of a model only its "
        "config.json and tokenizer.",
    )
    esi_redundant_time: float = key(
        0.0,
        "Seconds to spare before a deadline at which the run saves: of `max_wall_seconds`, of an elastic instance, of "
        "a Slurm job.",
        at_least=0,
    )


@dataclass(frozen=True)
class ValidationRecordsConfig:
    """Records of validation responses."""

    validation_data_dir: str | None = key(None, "Folder for validation responses as `<step>.jsonl`; null = none.")
    log_val_generations: int = key(0, "Number of validation responses to show in the trackers.", at_least=0)


@dataclass(frozen=True)
class TrainerConfig(ValidationRecordsConfig, TrainingRunConfig):
    """The run: length, devices, validation, checkpoints and records."""

    critic_warmup: int = key(0, "Steps that update only the critic.", at_least=0)
    balance_batch: bool = key(
        True,
        "Balance the work: mini-batches get similar length distributions, and data-parallel ranks get equal compute "
        "by the model's cost. Results do not depend on the number of ranks.",
    )
    val_before_train: bool = key(False, "Validate before the first step.")
    val_only: bool = key(False, "Validate and stop.")
    test_freq: int = key(
        -1, "Steps between validations; the last step is validated too; -1 = never.", at_least=1, allowed=(-1,)
    )
    max_actor_ckpt_to_keep: int | None = key(
        None,
        "Newest checkpoints that keep the actor; null = all. A checkpoint without roles is removed.",
        at_least=1,
    )
    max_critic_ckpt_to_keep: int | None = key(
        None,
        "Newest checkpoints that keep the critic; null = all. PPO resumes only from a checkpoint with both.",
        at_least=1,
    )
    best_metric: str | None = key(
        None,
        "Validation metric, such as `val-core/<data_source>/reward/mean@1`, that selects the best checkpoint, which is "
        "kept in full; a new best validation saves a checkpoint independent of `save_freq`; null = none.",
    )
    best_mode: str = key(
        "max", "Whether the best value is the largest or the smallest; read with `best_metric`.", choices=("max", "min")
    )
    rollout_data_dir: str | None = key(None, "Folder for the responses of every step as `<step>.jsonl`; null = none.")
    callbacks: list[str] = key(
        [], "User callbacks, each as `path.py:Class` or `package.module.Class` (docs/reference/metrics.md#callbacks)."
    )


@dataclass(frozen=True)
class EvaluateRunConfig(ValidationRecordsConfig, CollectivesConfig, RunConfig):
    """The run: devices and records."""

    validation_data_dir: str | None = derived_key(
        "Folder for the responses as `<step>.jsonl`; auto = `answers/` in the run's folder."
    )


@dataclass(frozen=True)
class SupervisedRunConfig(TrainingRunConfig):
    """The run: length, devices, checkpoints and records."""

    hf_export_dir: str | None = derived_key(
        "Folder for the final model in Hugging Face format; auto = `outputs/<experiment_name>/hf`."
    )
    max_ckpt_to_keep: int | None = key(None, "Newest checkpoints to keep; null = all.", at_least=1)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    target_accuracy: float | None = key(
        None,
        "Stop early once `train/accuracy`, averaged over the last 10 steps, reaches this value; null = never. It is "
        "the share of responses that greedy decoding reproduces exactly; for a reward model, the share of pairs in "
        "the right order.",
        above=0,
        at_most=1,
    )


@dataclass(frozen=True)
class PairRunConfig(SupervisedRunConfig):
    """The run: length, devices, validation, checkpoints and records."""

    test_freq: int = key(
        -1, "Steps between validations; the last step is validated too; -1 = never.", at_least=1, allowed=(-1,)
    )
