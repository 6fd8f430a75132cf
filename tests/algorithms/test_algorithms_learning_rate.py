from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from megarl.algorithms import LearningRateSchedule, learning_rate
from megarl.errors import ConfigError


def rates(schedule: LearningRateSchedule, steps: int) -> list[float]:
    return [learning_rate(step, schedule) for step in range(steps)]


def test_warm_up_rises_linearly_then_stays() -> None:
    assert rates(LearningRateSchedule(lr=4.0, warmup_steps=4), 6) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_linear_decay_ends_at_the_minimum_and_stays_there() -> None:
    schedule = LearningRateSchedule(lr=5.0, min_lr=1.0, decay_style="linear", warmup_steps=1, total_steps=5)
    assert rates(schedule, 7) == pytest.approx([5.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0])


def test_cosine_decay_is_half_a_cosine() -> None:
    schedule = LearningRateSchedule(lr=3.0, min_lr=1.0, decay_style="cosine", total_steps=4)
    expected = [1.0 + (math.cos(math.pi * step / 4) + 1.0) for step in range(5)]
    assert rates(schedule, 6) == pytest.approx([*expected, 1.0])


@pytest.mark.parametrize(
    ("style", "decay"),
    [
        ("linear", [5.0, 4.0, 3.0, 2.0]),
        # 2 * 0.5 ** (0, 1/4, 1/2, 3/4) - 1, of 4, above 1
        ("exponential", [5.0, 3.727171, 2.656854, 1.756828]),
        ("cosine", [5.0, 4.414214, 3.0, 1.585786]),
    ],
)
def test_wsd_stays_and_then_decays_over_its_last_steps(style: str, decay: list[float]) -> None:
    schedule = LearningRateSchedule(
        lr=5.0,
        min_lr=1.0,
        decay_style="wsd",
        warmup_steps=2,
        total_steps=9,
        wsd_decay_steps=4,
        wsd_decay_style=style,
    )
    assert rates(schedule, 11) == pytest.approx([2.5, 5.0, 5.0, 5.0, 5.0, *decay, 1.0, 1.0], abs=1e-6)


def test_wsd_may_decay_from_the_end_of_its_warm_up() -> None:
    schedule = LearningRateSchedule(
        lr=2.0, decay_style="wsd", warmup_steps=2, total_steps=4, wsd_decay_steps=2, wsd_decay_style="linear"
    )
    assert rates(schedule, 5) == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])


WARMUP, TOTAL, DECAY, LR = 3, 12, 5, 2.0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"decay_style": "constant"}, lambda o: transformers.get_constant_schedule_with_warmup(o, WARMUP)),
        ({"decay_style": "linear"}, lambda o: transformers.get_linear_schedule_with_warmup(o, WARMUP, TOTAL)),
        ({"decay_style": "cosine"}, lambda o: transformers.get_cosine_schedule_with_warmup(o, WARMUP, TOTAL)),
        *(
            (
                {"decay_style": "wsd", "wsd_decay_style": style, "min_lr": 0.5},
                lambda o, style=style: transformers.get_wsd_schedule(
                    o, WARMUP, DECAY, num_training_steps=TOTAL, decay_type=style, min_lr_ratio=0.5 / LR
                ),
            )
            for style in ("linear", "cosine")
        ),
    ],
)
def test_after_the_warm_up_as_transformers(ours: dict[str, Any], theirs: Any) -> None:
    """During warm-up a step ahead of transformers, whose first step has no rate (with wsd, the smallest)."""
    schedule = LearningRateSchedule(lr=LR, warmup_steps=WARMUP, total_steps=TOTAL, wsd_decay_steps=DECAY, **ours)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = theirs(optimizer)
    expected = []
    for _ in range(TOTAL + 1):  # its cosine rises again behind the end
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    if not schedule.min_lr:
        assert rates(schedule, WARMUP) == pytest.approx(expected[1 : WARMUP + 1])
    assert rates(schedule, TOTAL + 1)[WARMUP:] == pytest.approx(expected[WARMUP:])
    assert len(set(expected)) > 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay_style": "cosin"}, "decay_style='cosin' must be one of constant, linear, cosine, wsd"),
        ({"wsd_decay_style": "sqrt"}, "wsd_decay_style='sqrt' must be one of linear, cosine, exponential"),
        ({"decay_style": "linear", "total_steps": 3, "warmup_steps": 3}, "total_steps=3 must exceed warmup_steps=3"),
        ({"decay_style": "wsd", "total_steps": 5, "warmup_steps": 2}, "wsd_decay_steps=0 must be 1 to 3"),
        (
            {"decay_style": "wsd", "total_steps": 5, "warmup_steps": 2, "wsd_decay_steps": 4},
            "wsd_decay_steps=4 must be 1 to 3",
        ),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearningRateSchedule(**settings)
