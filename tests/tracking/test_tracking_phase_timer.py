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


def test_phases_at_the_same_time_count_once():
    """Starts and ends of three phases on a clock that the test sets; the last one ends with the block."""
    now = 0.0
    timer = PhaseTimer(clock=lambda: now)
    with timer.phases(["old_log_prob", "ref", "values"]) as end:
        now = 2.0
        end(1)
        now = 5.0
        end(0)
        now = 6.0
        end(2)
        now = 7.0  # the results are joined
    with timer.phase("ref"):
        now = 8.0
    assert timer.seconds == {"old_log_prob": 5.0, "ref": 3.0, "values": 7.0}
    assert timer.exposed(["old_log_prob", "ref", "values", "gen"]) == 8.0
    assert timer.metrics() == {
        "timing_s/old_log_prob": 5.0,
        "timing_s/ref": 3.0,
        "timing_s/values": 7.0,
        "timing_hidden_s/old_log_prob": 5.0,
        "timing_hidden_s/ref": 2.0,
    }
    timer.reset()
    assert timer.metrics() == {}


def test_a_failure_ends_phases_at_the_same_time():
    now = 0.0
    timer = PhaseTimer(clock=lambda: now)
    with pytest.raises(RuntimeError), timer.phases(["update_critic", "update_actor"]):
        now = 3.0
        raise RuntimeError
    assert timer.seconds == {"update_critic": 3.0, "update_actor": 3.0} and timer.exposed(timer.seconds) == 3.0
