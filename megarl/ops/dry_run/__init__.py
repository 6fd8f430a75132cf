"""Dry run (``trainer.dry_run=true``): everything a job does before its first worker starts, without devices and Ray.

:mod:`~megarl.ops.dry_run.parts` lists the parts and implements the shared ones; :mod:`~megarl.ops.dry_run.jobs` adds
those of each job.
"""

from __future__ import annotations

from megarl.config import SupervisedConfig, TrainConfig
from megarl.ops.dry_run.jobs import SupervisedDryRun, TrainDryRun
from megarl.ops.dry_run.parts import check_parts
from megarl.trainer.jobs.supervised_jobs import supervised_job


def run(config: TrainConfig | SupervisedConfig) -> None:
    """Check every part of a training job and print the result of each.

    Raises:
        ConfigError: a part failed; the message lists all failed parts.
    """
    if isinstance(config, SupervisedConfig):
        check_parts(SupervisedDryRun(supervised_job(config)))
    else:
        check_parts(TrainDryRun(config))
