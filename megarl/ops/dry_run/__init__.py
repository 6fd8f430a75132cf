"""Dry run (``trainer.dry_run=true``): everything a job does before its first worker starts, without devices and Ray.

:mod:`~megarl.ops.dry_run.parts` lists the parts and implements the shared ones; :mod:`~megarl.ops.dry_run.jobs` adds
those of each job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.config import PreferenceConfig, RewardTrainingConfig, SFTConfig, SupervisedConfig, TrainConfig
from megarl.ops.dry_run.jobs import SupervisedDryRun, TrainDryRun
from megarl.ops.dry_run.parts import check_parts
from megarl.trainer.jobs.preference import preference_training
from megarl.trainer.jobs.sft import FineTuning
from megarl.trainer.jobs.supervised import SupervisedJob
from megarl.trainer.jobs.train_reward_model import RewardTraining

_SUPERVISED: dict[type, Callable[[Any], SupervisedJob]] = {
    SFTConfig: FineTuning,
    RewardTrainingConfig: RewardTraining,
    PreferenceConfig: preference_training,
}


def run(config: TrainConfig | SupervisedConfig) -> None:
    """Check every part of a training job and print the result of each.

    Raises:
        ConfigError: a part failed; the message lists all failed parts.
    """
    is_supervised = isinstance(config, SupervisedConfig)
    check_parts(SupervisedDryRun(_SUPERVISED[type(config)](config)) if is_supervised else TrainDryRun(config))
