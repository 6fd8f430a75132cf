"""Dry run (``trainer.dry_run=true``): everything a job does before its first worker starts, without devices and Ray.

:mod:`~megarl.ops.dry_run.parts` lists the parts and implements the shared ones; :mod:`~megarl.ops.dry_run.jobs` adds
those of each job.
"""

from __future__ import annotations

from megarl.config import PreferenceConfig, RewardTrainingConfig, SFTConfig, SupervisedConfig, TrainConfig
from megarl.ops.dry_run.jobs import SupervisedDryRun, TrainDryRun
from megarl.ops.dry_run.parts import DryRun, check_parts
from megarl.trainer.jobs.preference import preference_training
from megarl.trainer.jobs.sft import FineTuning
from megarl.trainer.jobs.train_reward_model import RewardTraining


def run(config: TrainConfig | SupervisedConfig) -> None:
    """Check every part of a training job and print the result of each.

    Raises:
        ConfigError: a part failed; the message lists all failed parts.
    """
    check_parts(_dry_run_of(config))


def _dry_run_of(config: TrainConfig | SupervisedConfig) -> DryRun:
    if isinstance(config, TrainConfig):
        return TrainDryRun(config)
    if isinstance(config, RewardTrainingConfig):
        return SupervisedDryRun(RewardTraining(config))
    if isinstance(config, PreferenceConfig):
        return SupervisedDryRun(preference_training(config))
    if isinstance(config, SFTConfig):
        return SupervisedDryRun(FineTuning(config))
    raise TypeError(f"no dry run for {type(config).__name__}")
