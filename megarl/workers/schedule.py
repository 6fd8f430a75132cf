"""From an optimizer's configuration to its learning-rate schedule, for the driver's checks and the workers alike."""

from __future__ import annotations

from typing import NamedTuple

from megarl.algorithms import LearningRateSchedule
from megarl.config import OptimConfig


class ScheduleSteps(NamedTuple):
    """Lengths of a schedule in optimizer steps, with the keys of the configuration that say so.

    Attributes:
        total: steps of the whole schedule.
        warmup: of them, steps of the warm-up.
        wsd_decay: of them, steps of the decay of ``wsd``.
        warmup_key: key in the optimizer's section that gives ``warmup``.
        wsd_decay_key: likewise for ``wsd_decay``.
    """

    total: int
    warmup: int
    wsd_decay: int
    warmup_key: str
    wsd_decay_key: str


def schedule_steps(optim: OptimConfig, updates: int) -> ScheduleSteps:
    """The lengths with every "null = ..." and every ratio resolved; whether they fit is not looked at.

    Args:
        optim: the optimizer's section.
        updates: optimizer steps of the whole run.
    """
    total = optim.total_training_steps or updates
    warmup, warmup_key = optim.lr_warmup_steps, "lr_warmup_steps"
    if warmup < 0:
        warmup, warmup_key = int(optim.lr_warmup_steps_ratio * total), "lr_warmup_steps_ratio"
    decay, decay_key = optim.lr_wsd_decay_steps, "lr_wsd_decay_steps"
    if decay < 0:
        decay, decay_key = max(1, int(optim.lr_wsd_decay_steps_ratio * total)), "lr_wsd_decay_steps_ratio"
    return ScheduleSteps(total, warmup, decay, warmup_key, decay_key)


def schedule_of(optim: OptimConfig, updates: int) -> LearningRateSchedule:
    """The schedule of a run.

    Args:
        optim: the optimizer's section.
        updates: optimizer steps of the whole run.

    Raises:
        ConfigError: its lengths do not fit; the driver has refused them by the names of their keys before.
    """
    steps = schedule_steps(optim, updates)
    return LearningRateSchedule(
        lr=optim.lr,
        min_lr=optim.min_lr,
        decay_style=optim.lr_decay_style,
        warmup_steps=steps.warmup,
        total_steps=steps.total,
        wsd_decay_steps=steps.wsd_decay,
        wsd_decay_style=optim.lr_wsd_decay_style,
    )
