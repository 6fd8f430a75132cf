"""Schedules: reward-shaping weights by training step, and the learning rate by optimizer step; imports no torch.

A weight rises from 0 to its maximum over a warm-up and is constant afterwards. The shape of the rise maps progress
through the warm-up to a share of the maximum, both from 0 to 1. Every shape except ``constant`` starts at exactly 0,
ends at exactly 1, and never falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.base.errors import ConfigError
from megarl.base.registry import Registry
from megarl.base.user_code import load_user_function

Shape = Callable[[float, int], float]
"""Maps progress in [0, 1] and a number of stairs to a share in [0, 1]."""

SIGMOID_STEEPNESS = 10.0
EXP_STEEPNESS = 5.0
DECAY_STYLES = ("constant", "linear", "cosine", "wsd")

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
}
"""Remaining share of ``lr - min_lr`` by progress of a decay: 1 at progress 0, 0 at progress 1.
``exponential`` is Megatron's: an exponential, shifted and scaled to end at zero."""

_CHECKED_POINTS = 1000
_ROUNDING = 1e-9  # 0.29 * 100 is a little below 29


@dataclass(frozen=True)
class WeightSchedule:
    """A reward-shaping weight as a function of the training step.

    Attributes:
        max_weight: the weight after the warm-up.
        warmup_steps: 0 = no warm-up.
        stairs: number of stairs of the shape ``step``; other shapes do not read it.
    """

    max_weight: float
    warmup_steps: int
    shape: Shape
    stairs: int = 1

    def weight(self, step: int) -> float:
        """Return the weight in training step ``step``, counted from 1; the last warm-up step has the full weight.

        At step 0, before training, it is 0, except for the shape ``constant``, which starts with the full weight.
        """
        if step >= self.warmup_steps:
            return self.max_weight
        return self.max_weight * self.shape(step / self.warmup_steps, self.stairs)


def warmup_steps(warmup_ratio: float, total_steps: int) -> int:
    """Count the warm-up steps for a share of a run's steps, rounded down."""
    return int(warmup_ratio * total_steps + _ROUNDING)


def _load_user_shape(spec: str, key: str) -> Shape:
    function = load_user_function(spec, key)
    _check_shape(spec, function)
    return lambda progress, stairs: float(function(progress))


SCHEDULES: Registry[Shape] = Registry("schedule", loader=_load_user_shape)


def _check_shape(spec: str, function: Callable[[float], Any]) -> None:
    last = 0.0
    for number in range(_CHECKED_POINTS + 1):
        progress = number / _CHECKED_POINTS
        try:
            share = float(function(progress))
        except Exception as error:
            text = f"schedule {spec!r} failed at {progress:g}: {type(error).__name__}: {error}"
            raise ConfigError(text, code="algorithm.schedule-failed") from error
        if not last <= share <= 1:  # also true for NaN
            text = f"schedule {spec!r} is {share:g} at {progress:g} after {last:g}; it must not fall or leave [0, 1]"
            raise ConfigError(text, code="algorithm.schedule-not-rising")
        last = share
    if last != 1:
        text = f"schedule {spec!r} is {last:g} at the end of the warm-up, at progress 1; it must be 1 there"
        raise ConfigError(text, code="algorithm.schedule-end")


def _sigmoid(progress: float, stairs: int) -> float:
    """Compute ``(s(x) - s(0)) / (s(1) - s(0))`` with ``s(x) = 1 / (1 + exp(-10 (x - 1/2)))``."""
    share, start, end = (1.0 / (1.0 + math.exp(-SIGMOID_STEEPNESS * (x - 0.5))) for x in (progress, 0.0, 1.0))
    return (share - start) / (end - start)


SCHEDULES.update(
    {
        "linear": lambda x, stairs: x,
        "cosine": lambda x, stairs: 0.5 * (1.0 - math.cos(math.pi * x)),
        "sigmoid": _sigmoid,
        "exp": lambda x, stairs: math.expm1(EXP_STEEPNESS * x) / math.expm1(EXP_STEEPNESS),
        "step": lambda x, stairs: math.floor(x * stairs + _ROUNDING) / stairs,  # the last stair is the end
        "constant": lambda x, stairs: 1.0,
    }
)


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """A learning rate with linear warm-up, followed by a constant rate or a decay.

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate at and after the end of the decay.
        decay_style: ``constant``, ``linear``, ``cosine``, or ``wsd`` (warm-up, stable, decay).
        warmup_steps: optimizer steps over which the rate rises linearly from zero.
        total_steps: optimizer steps until the decay has ended; not read for ``constant``.
        wsd_decay_steps: the last optimizer steps before ``total_steps``, over which ``wsd`` decays.
        wsd_decay_style: shape of that decay: ``linear``, ``cosine`` or ``exponential``.

    Raises:
        ConfigError: a style is unknown, or the steps leave no room for warm-up and decay.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    decay_style: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    wsd_decay_steps: int = 0
    wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        for name, valid in (("decay_style", DECAY_STYLES), ("wsd_decay_style", DECAY_SHAPES)):
            if (style := getattr(self, name)) not in valid:
                text = f"{name}={style!r} must be one of {', '.join(valid)}"
                raise ConfigError(text, code="algorithm.schedule-style")
        if problem := _steps_problem(self):
            raise ConfigError(problem, code="algorithm.schedule-steps")


def _steps_problem(schedule: LearningRateSchedule) -> str:
    """Describe the first wrong number of steps; empty if warm-up and decay have room."""
    warmup, total, decay = schedule.warmup_steps, schedule.total_steps, schedule.wsd_decay_steps
    if schedule.decay_style == "constant":
        return ""
    if total <= warmup:
        return f"total_steps={total} must exceed warmup_steps={warmup} for decay_style={schedule.decay_style!r}"
    if schedule.decay_style == "wsd" and not 0 < decay <= total - warmup:
        most = total - warmup
        return f"wsd_decay_steps={decay} must be 1 to {most}: total_steps={total} - warmup_steps={warmup}"
    return ""


def learning_rate(step: int, schedule: LearningRateSchedule) -> float:
    """Return the learning rate of an optimizer step.

    During warm-up it is ``lr * (step + 1) / warmup_steps``: the first step has a rate above 0, and the last warm-up
    step has the full rate. (The schedulers of Megatron and transformers use ``step / warmup_steps``: their first step
    changes nothing.) Afterwards the rate equals theirs: ``lr``, or ``min_lr + (lr - min_lr) * left``. ``left`` falls
    from 1 to 0 by a shape of :data:`DECAY_SHAPES`, between the end of the warm-up and ``total_steps``, or over the last
    ``wsd_decay_steps`` before it. Step number ``total_steps`` is the first with ``min_lr``, so a run of ``total_steps``
    steps ends one step before it.

    Args:
        step: number of optimizer steps taken before.
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
