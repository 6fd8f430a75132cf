"""Slow hosts: which host delays a step, by how long, and when the user is told."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.layout import ParallelLayout
from megarl.trainer.records.slow_hosts import SLOW, SlowHostWarnings, host_delays, hosts_of_ranks

FOUR = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("seconds", "work", "expected"),
    [
        ([1.0, 1.0, 10.0, 9.0], [1.0] * 4, {"b": 9.0}),  # at its speed, the step would take 1 s
        ([1.0, 2.0, 10.0, 9.0], [1.0, 2.0, 1.0, 0.9], {"b": 8.0}),  # the others take 2 s, since one has more work
        ([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0], {}),  # more work, no slow host
        ([1.0, 1.0, 1.2, 1.2], [1.0] * 4, {}),  # a small difference
        ([1.0, 1.0, 4.0, 4.0], [1.0, 1.0, 2.0, 2.0], {"b": 2.0}),  # with its work, another host would take 2 s
        ([5.0, 5.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], {"a": 4.0}),  # a rank without work says nothing
        ([1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], {}),
    ],
)
def test_delay_of_a_slow_host(seconds, work, expected):
    assert host_delays(seconds, work, FOUR) == pytest.approx(expected)


def test_one_host_is_compared_with_no_other():
    assert host_delays([1.0, 9.0], [1.0, 1.0], ["a", "a"]) == {}


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.lists(st.floats(0.01, 100), min_size=4, max_size=4))
def test_a_delay_is_below_the_time_of_the_verb(seconds, work):
    assert all(0 < delay < max(seconds) for delay in host_delays(seconds, work, FOUR).values())


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.floats(1.0, SLOW - 0.01))
def test_time_in_proportion_to_work_is_no_delay(work, factor):
    seconds = [amount * (factor if rank > 1 else 1.0) for rank, amount in enumerate(work)]
    assert host_delays(seconds, work, FOUR) == {}


def test_ranks_over_several_hosts_have_all_their_names():
    layout = ParallelLayout(pp=2, dp=2)
    hosts = {rank: "ab"[layout.coordinate(rank).pp] if layout.coordinate(rank).dp else "c" for rank in range(4)}
    group = SimpleNamespace(layout=layout, processes={r: SimpleNamespace(host=host) for r, host in hosts.items()})
    assert hosts_of_ranks(group) == ["c", "a, b"]


def test_a_host_is_reported_once_after_three_slow_steps():
    warnings = SlowHostWarnings()

    def step(delay, seconds=10.0):
        return warnings.sentences({"actor/tokens": [1, 2], "delay_s/10.0.0.2": [delay]}, seconds)

    assert [step(4.0), step(4.0), step(0.5), step(4.0), step(4.0)] == [[]] * 5
    [sentence] = step(4.0)
    assert "10.0.0.2" in sentence and "12.0 s" in sentence and "30.0 s" in sentence
    assert step(4.0) == [] and warnings.sentences({}, 10.0) == []
