"""Checks over several sections: impossible combinations of keys, refused before anything starts.

A check takes the complete configuration of a job and yields problems with key, value and remedy. All checks of a job
run, so that one error reports everything. A new check is one function in a module of this folder and one entry below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megarl.config.batch import batch_problems, reward_model_problems
from megarl.config.checks import asynchronous, generation, layout, learning, run
from megarl.config.problems import Problem
from megarl.config.schema.jobs import (
    EvaluateConfig,
    GenerateConfig,
    JobConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
    TrainConfig,
)

Check = Callable[[Any], Iterable[Problem]]


def check(config: JobConfig) -> list[Problem]:
    """List all problems of a configuration whose keys are valid one by one."""
    return [problem for one_check in _CHECKS[type(config)] for problem in one_check(config)]


_TRAIN: tuple[Check, ...] = (
    run.training_data,
    run.custom_data_classes,
    run.timeline,
    run.watchdog_phases,
    run.watchdog_before_collectives,
    run.replicas_before_watchdog,
    run.sync_before_watchdog,
    layout.train_layouts,
    layout.unused_devices,
    layout.replicas,
    layout.weight_sync,
    learning.adapters,
    learning.estimator,
    learning.losses,
    learning.distillation,
    run.validation,
    generation.validation_sampling,
    generation.token_filters,
    generation.sampled_support,
    run.resume,
    run.checkpoints,
    generation.agents,
    generation.reward_functions,
    learning.rollout_correction,
    learning.router_replay,
    learning.selection,
    learning.reference_shaping,
    asynchronous.async_mode,
    asynchronous.async_devices,
    asynchronous.elastic_replicas,
    asynchronous.hybrid_rollout,
    asynchronous.async_sizes,
    asynchronous.async_algorithm,
    asynchronous.stale_data,
    generation.reward_model,
    run.profilers,
    learning.optimizers,
    batch_problems,
)
_SUPERVISED: tuple[Check, ...] = (
    run.training_data,
    run.timeline,
    run.watchdog_phases,
    run.watchdog_before_collectives,
    layout.supervised_layout,
    learning.adapters,
    learning.optimizers,
    batch_problems,
    run.resume,
    run.supervised_checkpoints,
)
_EVALUATE: tuple[Check, ...] = (
    generation.evaluation_files,
    run.timeline,
    run.watchdog_phases,
    run.watchdog_before_collectives,
    run.replicas_before_watchdog,
    layout.replicas,
    generation.validation_sampling,
    generation.token_filters,
    generation.agents,
    generation.reward_model,
    generation.reward_functions,
    reward_model_problems,
)
_GENERATE: tuple[Check, ...] = (
    generation.generation_prompts,
    run.timeline,
    run.watchdog_phases,
    run.replicas_before_watchdog,
    layout.replicas,
    generation.validation_sampling,
    generation.token_filters,
    generation.agents,
)
_CHECKS: dict[type, tuple[Check, ...]] = {
    TrainConfig: _TRAIN,
    SFTConfig: _SUPERVISED,
    RewardTrainingConfig: (*_SUPERVISED, run.pair_validation),
    PreferenceConfig: (*_SUPERVISED, run.pair_validation, learning.preference_loss),
    EvaluateConfig: _EVALUATE,
    GenerateConfig: _GENERATE,
}
