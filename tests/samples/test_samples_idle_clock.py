"""Idle ratios of trainer and engines, by a clock that the test moves."""

import pytest

from megarl.samples.idle_clock import IdleClock


def test_idle_ratios_of_two_sync_intervals():
    """10 s with waits of 1 s and 1.5 s, then 4 s without a wait; the engines work 90 %, then not at all."""
    now = 100.0
    clock = IdleClock(lambda: now)
    assert clock.metrics(0.0) == {}, "before training"

    clock = IdleClock(lambda: now)
    clock.start()
    with clock.waiting():
        now += 1.0
    now += 3.0
    clock.start()  # the next batch of the same interval
    with clock.waiting():
        now += 1.5
    now += 4.5
    metrics = clock.metrics(0.9)
    assert metrics == {
        "fully_async/trainer/idle_ratio": pytest.approx(0.25),
        "fully_async/rollouter/idle_ratio": pytest.approx(0.1),
    }
    now += 4.0
    assert clock.metrics(0.0) == {"fully_async/trainer/idle_ratio": 0.0, "fully_async/rollouter/idle_ratio": 1.0}
