"""Weights rise from 0 to their maximum over the warm-up and never fall."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.algorithms import (
    SCHEDULES,
    LearningRateSchedule,
    WeightSchedule,
    learning_rate,
    warmup_steps,
)
from megarl.base.algorithm_names import WEIGHT_SCHEDULES

RISING = [name for name in SCHEDULES if name != "constant"]
LN2 = math.log(2)
# By hand, of a largest weight of 0.4, a warm-up of 8 steps and 4 stairs, for steps 0 to 10.
EIGHT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
BY_HAND = {
    "linear": [0.4 * n / 8 for n in EIGHT],
    # sin(x / 2)^2 is half of 1 - cos(x)
    "cosine": [0.4 * math.sin(math.pi * n / 16) ** 2 for n in EIGHT],
    # 1 / (1 + e^-z) is half of 1 + tanh(z / 2), which is symmetric about the middle of the warm-up
    "sigmoid": [0.2 * (1 + math.tanh(5 * (n / 8 - 0.5)) / math.tanh(2.5)) for n in EIGHT],
    "exp": [0.4 * (2 ** (5 * n / 8 / LN2) - 1) / (2 ** (5 / LN2) - 1) for n in EIGHT],
    "step": [0, 0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.4],
    "constant": [0.4] * 11,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_values_are_those_of_the_formulas(name):
    schedule = WeightSchedule(0.4, 8, SCHEDULES.find(name), stairs=4)
    assert [schedule.weight(step) for step in range(11)] == pytest.approx(BY_HAND[name], rel=1e-12)


def test_table_in_the_documentation():
    lines = (
        (Path(__file__).parents[2] / "docs" / "reference" / "reward_shaping.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    (head,) = [row for row in rows if row[0] == "schedule"]
    shown = {row[0].strip("`"): row[2:] for row in rows if row[0].strip("`") in SCHEDULES}
    assert shown.keys() == set(SCHEDULES)
    for name, cells in shown.items():
        shares = [SCHEDULES.find(name)(float(progress), 3) for progress in head[2:]]
        assert [f"{share:.3f}" for share in shares] == cells


def test_config_lists_the_same_schedules():
    assert set(WEIGHT_SCHEDULES) == set(SCHEDULES)


@given(
    st.sampled_from(RISING),
    st.floats(0, 10),
    st.floats(0, 1),
    st.integers(1, 100_000),
    st.integers(1, 50),
    st.data(),
)
def test_schedules_never_fall_and_end_at_the_maximum(name, largest, ratio, total, stairs, data):
    warmup = warmup_steps(ratio, total)
    assert 0 <= warmup <= total and abs(warmup - ratio * total) < 1 + 1e-6
    schedule = WeightSchedule(largest, warmup, SCHEDULES.find(name), stairs)
    assert schedule.weight(0) == (0 if warmup else largest)
    steps = sorted(data.draw(st.lists(st.integers(0, warmup + 5), min_size=2, max_size=30)))
    weights = [schedule.weight(step) for step in [0, *steps, warmup, *steps[-1:], total]]
    early = [schedule.weight(step) for step in steps]
    assert early == sorted(early)
    assert all(0 <= weight <= largest for weight in weights)
    assert schedule.weight(warmup) == schedule.weight(total) == schedule.weight(10 * total) == largest


@given(st.sampled_from(RISING), st.integers(1, 400))
def test_weights_of_neighbouring_steps(name, warmup):
    schedule = WeightSchedule(1.0, warmup, SCHEDULES.find(name), stairs=7)
    weights = [schedule.weight(step) for step in range(warmup + 1)]
    assert weights == sorted(weights) and (weights[0], weights[-1]) == (0, 1)
    if name == "step" and warmup >= 7:
        assert {round(7 * weight, 9) for weight in weights} == set(range(8))


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.29, 100, 29), (0.7, 10, 7), (0.05, 10, 0), (1, 3, 3)])
def test_warmup_steps(ratio, total, steps):
    assert warmup_steps(ratio, total) == steps


OWN = """
def square(progress): return progress * progress
def late(progress): return 0.5 * progress
def falling(progress): return 1 - progress
def broken(progress): return 1 / progress
def wild(progress): return float("nan")
number = 3
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "shapes.py"
    file.write_text(OWN, encoding="utf-8")
    return file


def test_user_schedule(own):
    schedule = WeightSchedule(2.0, 10, SCHEDULES.find(f"{own}:square"))
    assert [schedule.weight(step) for step in (0, 5, 10, 11)] == pytest.approx([0, 0.5, 2, 2])


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("late", "algorithm.schedule-end", "0.5"),
        ("falling", "algorithm.schedule-not-rising", "0.999 at 0.001 after 1"),
        ("broken", "algorithm.schedule-failed", "at 0: ZeroDivisionError"),
        ("wild", "algorithm.schedule-not-rising", "nan at 0"),
        ("number", "config.user-code-not-callable", "int"),
    ],
)
def test_invalid_user_schedules_are_rejected(own, name, code, values):
    with raises(code, f"{own}:{name}", values):
        SCHEDULES.find(f"{own}:{name}")


def test_unknown_schedule_is_an_error():
    with raises("config.unknown-name", "'quadratic'", "sigmoid"):
        SCHEDULES.find("quadratic")


def rates(schedule, steps):
    return [learning_rate(step, schedule) for step in range(steps)]


def test_warm_up_rises_linearly_then_stays():
    assert rates(LearningRateSchedule(lr=4.0, warmup_steps=4), 6) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_linear_decay_ends_at_the_minimum_and_stays_there():
    schedule = LearningRateSchedule(lr=5.0, min_lr=1.0, decay_style="linear", warmup_steps=1, total_steps=5)
    assert rates(schedule, 7) == pytest.approx([5.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0])


def test_cosine_decay_is_half_a_cosine():
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
def test_wsd_is_constant_then_decays(style, decay):
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


def test_wsd_may_decay_from_the_end_of_its_warm_up():
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
def test_after_the_warm_up_equals_transformers(ours, theirs):
    """During warm-up one step ahead of transformers, which starts at rate 0 (with wsd, at the minimum)."""
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
    ("settings", "code", "values"),
    [
        ({"decay_style": "cosin"}, "style", ["decay_style='cosin'", "constant, linear, cosine, wsd"]),
        ({"wsd_decay_style": "sqrt"}, "style", ["wsd_decay_style='sqrt'", "linear, cosine, exponential"]),
        (
            {"decay_style": "linear", "total_steps": 3, "warmup_steps": 3},
            "steps",
            ["total_steps=3", "warmup_steps=3"],
        ),
        ({"decay_style": "wsd", "total_steps": 5, "warmup_steps": 2}, "steps", ["wsd_decay_steps=0", "1 to 3"]),
        (
            {"decay_style": "wsd", "total_steps": 5, "warmup_steps": 2, "wsd_decay_steps": 4},
            "steps",
            ["wsd_decay_steps=4", "1 to 3"],
        ),
    ],
)
def test_impossible_schedules_are_rejected(settings, code, values):
    with raises(f"algorithm.schedule-{code}", *values):
        LearningRateSchedule(**settings)
