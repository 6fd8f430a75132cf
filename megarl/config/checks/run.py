"""Checks of the run: training data, validation, resume, checkpoints, timeline, profilers and time limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from megarl.base.timeouts import RAY_SILENCE_S, REPORT_S
from megarl.config.problems import Problem
from megarl.config.schema.jobs import (
    EvaluateConfig,
    GenerateConfig,
    JobConfig,
    PairTrainingConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.schema.model import HF_MODEL, RESUMABLE, CheckpointConfig
from megarl.config.schema.run import PHASES, CollectivesConfig

_MIXTURE_KEYS = ("files", "weight")
_REF = "actor_rollout_ref.ref"
_WATCHDOG = "trainer.watchdog"
_HEALTH = "actor_rollout_ref.rollout.health.timeout_s"
_GENERATING = ("gen", "testing")


def training_data(config: TrainConfig | SupervisedConfig) -> Iterator[Problem]:
    """Check that training files, mixture and curriculum name the data once."""
    data = config.data
    if not data.train_files and not data.mixture:
        text = "must name at least one file, or set data.mixture"
        yield Problem("data.train_files", data.train_files, text, code="data.no-train-files")
    if data.train_files and data.mixture:
        text = "names training files, as data.train_files does; set that to []"
        yield Problem("data.mixture", data.mixture, text, code="data.files-and-mixture")
    if data.mixture and data.curriculum.column:
        text = "sorts the rows of one data set, and data.mixture has several; set their weights by step there"
        yield Problem("data.curriculum.column", data.curriculum.column, text, code="data.curriculum-with-mixture")
    for name, entry in data.mixture.items():
        yield from _mixture_entry(f"data.mixture.{name}", entry)


def _mixture_entry(path: str, entry: object) -> Iterator[Problem]:
    if not isinstance(entry, Mapping):
        yield Problem(path, entry, "must be a mapping with files and weight", code="data.mixture-entry")
        return
    for key in sorted(set(map(str, entry)) - set(_MIXTURE_KEYS)):
        text = "unknown key; there are files and weight"
        yield Problem(f"{path}.{key}", entry[key], text, code="data.mixture-unknown-key")
    files = entry.get("files")
    if not files or not isinstance(files, str | list) or not all(isinstance(file, str) for file in files):
        yield Problem(f"{path}.files", files, "must be a file or a list of files", code="data.mixture-files")


def custom_data_classes(config: TrainConfig) -> Iterator[Problem]:
    """Check that custom classes have file and name, and that a custom sampler is the only order."""
    sampler, dataset = config.data.sampler, config.data.custom_cls
    for path, file, name in (
        ("data.sampler.class_name", sampler.class_path, sampler.class_name),
        ("data.custom_cls.name", dataset.path, dataset.name),
    ):
        if (file is None) != (name is None):
            text = "file and name of the class go together; set both or none"
            yield Problem(path, name, text, code="data.custom-class-incomplete")
    if sampler.class_path and (config.data.mixture or config.data.curriculum.column):
        text = "decides the order of rows; set data.mixture={} and data.curriculum.column=null"
        yield Problem("data.sampler.class_path", sampler.class_path, text, code="data.two-orders")


def validation(config: TrainConfig) -> Iterator[Problem]:
    """Check that a validation has data."""
    trainer = config.trainer
    if config.data.val_files:
        return
    if config.reward.validation_function.path is not None:
        text = "needs data.val_files, which is empty"
        yield Problem(
            "reward.validation_function.path", config.reward.validation_function.path, text, code="data.no-val-files"
        )
    for name, enabled in (("val_only", trainer.val_only), ("val_before_train", trainer.val_before_train)):
        if enabled:
            yield Problem(f"trainer.{name}", enabled, "needs data.val_files, which is empty", code="data.no-val-files")
    if trainer.test_freq > 0:
        yield _no_validation_data(trainer.test_freq)


def pair_validation(config: PairTrainingConfig) -> Iterator[Problem]:
    """Check that a validation on pairs has data."""
    if config.trainer.test_freq > 0 and not config.data.val_files:
        yield _no_validation_data(config.trainer.test_freq)


def _no_validation_data(test_freq: int) -> Problem:
    text = "needs data.val_files, which is empty; -1 = never validate"
    return Problem("trainer.test_freq", test_freq, text, code="data.no-val-files")


def resume(config: TrainConfig | SupervisedConfig) -> Iterator[Problem]:
    """Check that resume mode and resume path agree."""
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and not path:
        text = "must be set with trainer.resume_mode=resume_path"
        yield Problem("trainer.resume_from_path", path, text, code="resume.no-path")
    if mode != "resume_path" and path:
        text = f"has no effect with trainer.resume_mode={mode}; set that to resume_path"
        yield Problem("trainer.resume_from_path", path, text, code="resume.unused-path")


def checkpoints(config: TrainConfig) -> Iterator[Problem]:
    """Check the contents of checkpoints, and that the best checkpoint can be found and saved."""
    yield from _contents(config.actor_rollout_ref.actor.checkpoint, "actor_rollout_ref.actor.checkpoint")
    if config.uses_critic:
        yield from _contents(config.critic.checkpoint, "critic.checkpoint")
    trainer = config.trainer
    if trainer.best_metric is not None:
        if trainer.test_freq < 1:
            text = f"needs validation, and trainer.test_freq={trainer.test_freq} has none; set that to 1 or more"
            yield Problem("trainer.best_metric", trainer.best_metric, text, code="checkpoint.best-needs-validation")
        if trainer.save_freq < 1:
            text = f"keeps a checkpoint, and trainer.save_freq={trainer.save_freq} saves none; set that to 1 or more"
            yield Problem("trainer.best_metric", trainer.best_metric, text, code="checkpoint.best-needs-saves")


def supervised_checkpoints(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the contents of checkpoints of a supervised job."""
    yield from _contents(config.trainer.checkpoint, "trainer.checkpoint")


def _contents(checkpoint: CheckpointConfig, path: str) -> Iterator[Problem]:
    saved, loaded = checkpoint.save_contents, checkpoint.load_contents
    if not saved:
        text = f"must name at least one of {', '.join(RESUMABLE)}"
        yield Problem(f"{path}.save_contents", saved, text, code="checkpoint.no-save-contents")
    elif "model" not in saved and saved != [HF_MODEL]:
        text = "no run can continue without model: add it, or save [hf_model] alone for other programs"
        yield Problem(f"{path}.save_contents", saved, text, code="checkpoint.save-without-model")
    if "model" not in loaded:
        text = (
            "must have model: without its weights there is nothing to continue; trainer.resume_mode=disable starts "
            "from scratch"
        )
        yield Problem(f"{path}.load_contents", loaded, text, code="resume.contents-without-model")
    for name, values in (("save_contents", saved), ("load_contents", loaded)):
        if len(set(values)) < len(values):
            yield Problem(f"{path}.{name}", values, "must name each entry once", code="checkpoint.repeated-contents")


def timeline(config: JobConfig) -> Iterator[Problem]:
    """Check the steps of the timeline."""
    steps = config.trainer.timeline.steps
    if any(step < 0 for step in steps):
        text = "steps are counted from 0, the time before the first"
        yield Problem("trainer.timeline.steps", steps, text, code="timeline.negative-step")


def profilers(config: TrainConfig) -> Iterator[Problem]:
    """Check that tool, steps, roles and ranks of the profiler are all set."""
    keys, roles = config.global_profiler, config.role_profilers
    enabled = {role: profiler for role, profiler in roles.items() if profiler.enable}
    for role, profiler in enabled.items():
        if keys.tool is None:
            text = "there is no profiler: set global_profiler.tool and global_profiler.steps"
            yield Problem(f"{role}.profiler.enable", profiler.enable, text, code="timeline.no-profiler")
        if not profiler.all_ranks and not profiler.ranks:
            text = f"no rank is profiled: name some, or set {role}.profiler.all_ranks=true"
            yield Problem(f"{role}.profiler.ranks", profiler.ranks, text, code="timeline.no-ranks")
    if _REF in enabled and config.actor_rollout_ref.ref.megatron is None:
        text = "the reference shares the actor's processes: set actor_rollout_ref.actor.profiler.enable"
        yield Problem(f"{_REF}.profiler.enable", enabled[_REF].enable, text, code="timeline.shared-processes")
    if keys.tool is None:
        return
    if not keys.steps:
        if enabled:
            text = "no step is profiled: name some, as [2]"
            yield Problem("global_profiler.steps", keys.steps, text, code="timeline.no-steps")
        return
    if not enabled:
        names = ", ".join(f"{role}.profiler.enable" for role in roles)
        text = f"no role is profiled: set one of {names}"
        yield Problem("global_profiler.tool", keys.tool, text, code="timeline.no-role")
    if keys.tool != "torch" and config.trainer.device == "cpu":
        yield Problem("global_profiler.tool", keys.tool, needs_cuda(keys.tool), code="timeline.needs-cuda")


def needs_cuda(tool: str) -> str:
    """Return the message for a profiler that works on CUDA only, with the alternative on a CPU."""
    records = {"torch_memory": "CUDA memory", "nsys": "CUDA activity"}[tool]
    return (
        f"{tool} records {records}, and this run is on CPU: use tool=torch, with memory among "
        "global_profiler.global_tool_config.torch.contents to see allocations"
    )


_COLLECTIVE = (
    *("old_log_prob", "ref", "teacher", "repr_align", "values"),
    *("update_critic", "update_actor", "update"),
    "save_checkpoint",
)
"""Phases whose ranks wait for each other, for at most ``trainer.nccl_timeout``."""


def watchdog_phases(config: JobConfig) -> Iterator[Problem]:
    """Check the names and values of the watchdog's limits by phase."""
    limits = config.trainer.watchdog.phases
    for phase, seconds in limits.items():
        if phase not in PHASES:
            text = f"there is no phase {phase!r}; there are {', '.join(PHASES)}"
            yield Problem(f"{_WATCHDOG}.phases", limits, text, code="config.watchdog-unknown-phase")
        elif seconds is not None and not (_is_number(seconds) and seconds > 0):
            text = f"{phase}: {seconds!r} must be seconds > 0, or null for no limit"
            yield Problem(f"{_WATCHDOG}.phases", limits, text, code="config.watchdog-limit")


def watchdog_before_collectives(config: JobConfig) -> Iterator[Problem]:
    """Check that the watchdog names the silent process before a collective fails, and both before Ray's limit."""
    trainer, keys = config.trainer, config.trainer.watchdog
    if not isinstance(trainer, CollectivesConfig):
        return
    nccl = trainer.nccl_timeout
    if nccl >= RAY_SILENCE_S:
        text = f"must be below {RAY_SILENCE_S} s, after which Ray calls a silent process dead"
        yield Problem("trainer.nccl_timeout", nccl, text, code="config.collective-timeout")
    if keys.timeout_s is not None and keys.timeout_s + REPORT_S > nccl:
        key = f"{_WATCHDOG}.timeout_s"
        text = _no_time_to_report(key, keys.timeout_s, nccl)
        yield Problem(key, keys.timeout_s, text, code="config.watchdog-after-collectives")
    for name in _COLLECTIVE:
        seconds = keys.phases.get(name)
        if _is_number(seconds) and seconds + REPORT_S > nccl:
            text = _no_time_to_report(f"{_WATCHDOG}.phases.{name}", seconds, nccl)
            yield Problem(f"{_WATCHDOG}.phases", keys.phases, text, code="config.watchdog-after-collectives")


def replicas_before_watchdog(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    """Check that a silent replica is replaced before the watchdog reports, or ends, the phase."""
    keys, health = config.trainer.watchdog, config.actor_rollout_ref.rollout.health.timeout_s
    limits = {f"{_WATCHDOG}.phases.{name}": keys.phases.get(name, keys.timeout_s) for name in _GENERATING}
    late = {path: seconds for path, seconds in limits.items() if _is_number(seconds) and seconds <= health}
    if late:
        path, seconds = min(late.items(), key=lambda item: item[1])
        path = path if path.rpartition(".")[2] in keys.phases else f"{_WATCHDOG}.timeout_s"
        text = (
            f"must be below {path}={seconds:g}, so that a silent replica is replaced before the phase counts as "
            f"stalled: set {_HEALTH}={0.75 * seconds:g}, or {path}={math.ceil(health / 0.75)}"
        )
        yield Problem(_HEALTH, health, text, code="config.replica-after-watchdog")


def sync_before_watchdog(config: TrainConfig) -> Iterator[Problem]:
    """Check that a weight sync replaces a silent replica before the watchdog ends the run."""
    keys, sync = config.trainer.watchdog, config.sync.timeout_s
    seconds = keys.phases.get("update_weights")
    if keys.action == "end" and _is_number(seconds) and seconds <= sync:
        text = (
            f"must be below {_WATCHDOG}.phases.update_weights={seconds:g}, so that a silent replica is replaced before "
            f"the run ends: set sync.timeout_s={0.75 * seconds:g}, or {_WATCHDOG}.phases.update_weights="
            f"{math.ceil(sync / 0.75)}"
        )
        yield Problem("sync.timeout_s", sync, text, code="sync.timeout-after-watchdog")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _no_time_to_report(key: str, seconds: float, nccl_timeout: int) -> str:
    largest = nccl_timeout - REPORT_S
    return (
        f"{seconds:g} s leave less than {REPORT_S:g} s for the report before trainer.nccl_timeout={nccl_timeout} ends "
        f"the workers: {f'set {key} to {largest:g} or less, or ' if largest > 0 else ''}"
        f"set trainer.nccl_timeout={math.ceil(seconds + REPORT_S)}"
    )
