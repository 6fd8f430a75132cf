"""The learning rate as a function of the optimizer step: pure numbers, the same for driver and workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megarl.errors import ConfigError

DECAY_STYLES = ("constant", "linear", "cosine", "wsd")

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
}
"""What is left of the way from ``min_lr`` to ``lr`` after a share ``progress`` of a decay: from 1 at 0 to 0 at 1.
``exponential`` is Megatron's: an exponential, shifted and scaled to end at zero."""


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """A linear rise, then a shape.

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate at the end of the decay; not below it afterwards.
        decay_style: ``constant``, ``linear``, ``cosine``, or ``wsd`` (warm-up, stable, decay).
        warmup_steps: optimizer steps over which the rate rises linearly from zero.
        total_steps: optimizer steps after which the decay has ended; read unless it is constant.
        wsd_decay_steps: the last optimizer steps before ``total_steps``, over which ``wsd`` decays.
        wsd_decay_style: shape of that decay: ``linear``, ``cosine`` or ``exponential``.

    Raises:
        ConfigError: the steps leave no room for what is asked.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    decay_style: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    wsd_decay_steps: int = 0
    wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        problem = schedule_problem(self)
        if problem is not None:
            raise ConfigError("{}={!r} {}".format(*problem))


def schedule_problem(schedule: LearningRateSchedule) -> tuple[str, object, str] | None:
    """What is wrong with a schedule: a field, its value, and what would be right. None if nothing is."""
    warmup, total, decay = schedule.warmup_steps, schedule.total_steps, schedule.wsd_decay_steps
    if schedule.decay_style not in DECAY_STYLES:
        return "decay_style", schedule.decay_style, f"must be one of {', '.join(DECAY_STYLES)}"
    if schedule.wsd_decay_style not in DECAY_SHAPES:
        return "wsd_decay_style", schedule.wsd_decay_style, f"must be one of {', '.join(DECAY_SHAPES)}"
    if schedule.decay_style == "constant":
        return None
    if total <= warmup:
        return "total_steps", total, f"must exceed warmup_steps={warmup} for decay_style={schedule.decay_style!r}"
    if schedule.decay_style == "wsd" and not 0 < decay <= total - warmup:
        return "wsd_decay_steps", decay, f"must be 1 to {total - warmup}: total_steps={total} - warmup_steps={warmup}"
    return None


def learning_rate(step: int, schedule: LearningRateSchedule) -> float:
    """Learning rate of an optimizer step.

    During warm-up it is ``lr * (step + 1) / warmup_steps``: the first step moves, and the last one of the warm-up has
    the whole rate. (The schedulers of Megatron and transformers use ``step / warmup_steps``, whose first step does
    nothing.) Afterwards it is theirs, step by step: ``lr``, or ``min_lr + (lr - min_lr) * left`` where ``left`` falls
    from 1 to 0 by a shape of :data:`DECAY_SHAPES`, between the end of the warm-up and ``total_steps``, or over the
    last ``wsd_decay_steps`` before it. The step numbered ``total_steps`` is the first with ``min_lr``, so that a run of
    ``total_steps`` steps ends one short of it.

    Args:
        step: number of steps taken before it.
        schedule: its shape.
    """
    if step < schedule.warmup_steps:
        return schedule.lr * (step + 1) / schedule.warmup_steps
    if schedule.decay_style == "constant":
        return schedule.lr
    start, shape = schedule.warmup_steps, schedule.decay_style
    if schedule.decay_style == "wsd":
        start, shape = schedule.total_steps - schedule.wsd_decay_steps, schedule.wsd_decay_style
    progress = min(1.0, max(0.0, (step - start) / (schedule.total_steps - start)))
    return schedule.min_lr + (schedule.lr - schedule.min_lr) * DECAY_SHAPES[shape](progress)
