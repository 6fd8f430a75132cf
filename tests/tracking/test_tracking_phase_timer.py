import itertools

import pytest

from megarl.tracking import PhaseTimer


def test_nested_and_failed_phases_are_summed():
    ticks = itertools.count()  # each look at the clock is one second later
    timer = PhaseTimer(clock=lambda: float(next(ticks)))
    with timer.phase("step"):  # 0 .. 7
        with timer.phase("gen"):  # 1 .. 2
            pass
        with timer.phase("gen"):  # 3 .. 4
            pass
        with pytest.raises(RuntimeError), timer.phase("reward"):  # 5 .. 6
            raise RuntimeError
    assert timer.seconds == {"gen": 2.0, "reward": 1.0, "step": 7.0}
    assert timer.metrics(tokens={"gen": 500, "reward": 0, "ref": 10}) == {
        "timing_s/gen": 2.0,
        "timing_s/reward": 1.0,
        "timing_s/step": 7.0,
        "timing_per_token_ms/gen": 4.0,
    }
    timer.reset()
    assert timer.metrics() == {}
