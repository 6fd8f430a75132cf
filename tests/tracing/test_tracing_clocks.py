from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.tracing.clocks import Exchange, measure


def test_the_fastest_exchange_decides() -> None:
    slow, fast = Exchange(0, 5_900, 1_000), Exchange(2_000, 7_110, 2_200)
    assert measure([slow, fast]) == (7_110 - 2_100, 100)


@given(
    ahead=st.integers(-(10**15), 10**15),
    delays=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=8),
)
def test_the_true_offset_lies_within_the_error_whatever_the_ways_take(
    ahead: int, delays: list[tuple[int, int]]
) -> None:
    exchanges, now = [], 0
    for there, back in delays:
        exchanges.append(Exchange(now, now + there + ahead, now + there + back))
        now += there + back + 1
    offset = measure(exchanges)
    assert abs(offset.ahead_ns - ahead) <= offset.error_ns + 1
