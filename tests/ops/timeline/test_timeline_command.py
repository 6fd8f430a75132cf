from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.ops.timeline.command import covered, own_seconds, summarize


def bar(name, category, start_s, end_s, process=1):
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": 0, **times}


def test_busy_shares_phases_and_gaps():
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "actor rank 0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "critic rank 0"}},
        {"ph": "i", "name": "step 1", "cat": "step", "pid": 0, "ts": 0.0},
        *(bar("step", "phase", 0, 10, 0), bar("gen", "phase", 1, 4, 0), bar("update_actor", "phase", 5, 9, 0)),
        *(bar("compute_log_prob", "verb", 0, 2), bar("update_actor", "verb", 5, 10)),
        *(bar("all_reduce", "communication", 6, 7), bar("all_reduce", "communication", 6.5, 8)),
        *(bar("onload optimizer", "copy", 5, 6), bar("compute_values", "verb", 2, 4, 2)),
    ]
    summary = summarize(events)
    actor, critic = summary.processes
    assert (actor.name, actor.busy, actor.communication, actor.copies) == ("actor rank 0", 0.7, 0.2, 0.1)
    assert (critic.name, critic.busy) == ("critic rank 0", 0.2)
    assert summary.phases == {"step": pytest.approx(3), "gen": pytest.approx(3), "update_actor": pytest.approx(4)}
    (gap,) = summary.gaps
    assert (gap.process, gap.start, gap.end) == ("actor rank 0", 2e6, 5e6)
    assert (gap.before, gap.after) == ("compute_log_prob", "update_actor")
    assert summary.steps == 1 and summary.seconds == 10
    assert "at 2.000 s, between compute_log_prob and update_actor" in summary.render()


def test_missing_events_are_reported():
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "actor rank 0"}},
        bar("update_actor", "verb", 0, 1),
        {"ph": "i", "name": "events left out: it is gone", "cat": "left out", "pid": 1, "ts": 2.5e6},
    ]
    line = "actor rank 0, until 2.500 s: events left out: it is gone"
    assert summarize(events).left_out == [line]
    assert summarize(events).render().endswith(f"\n\nnot in this timeline\n{line}")
    assert "not in this timeline" not in summarize(events[:2]).render()


def test_an_empty_timeline():
    assert summarize([]).render().startswith("0 steps, 0 processes, 0.00 s")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=12))
def test_covered_time_counts_overlaps_once(spans):
    moments = {moment for start, length in spans for moment in range(start, start + length)}
    assert covered((start, start + length, "") for start, length in spans) == len(moments)


def test_phases_at_the_same_time_have_their_whole_seconds():
    """Updates of critic (2 to 5 s) and actor (3 to 8 s) in lanes of the driver leave 4 of 10 s to the step."""
    lanes = {"update_critic": (1, 2, 5), "update_actor": (2, 3, 8)}
    events = [
        *(bar("step", "phase", 0, 10, 0), bar("update_actor", "verb", 3, 8), bar("update_critic", "verb", 2, 5, 2)),
        *({"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
          for lane, (number, _, _) in lanes.items()),
        *({**bar(name, "phase", start, end, 0), "tid": number} for name, (number, start, end) in lanes.items()),
    ]  # fmt: skip
    assert summarize(events).phases == pytest.approx({"step": 4, "update_critic": 3, "update_actor": 5})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_own_seconds_sum_to_the_outermost_span(lengths):
    """Consecutive inner spans within an outer one."""
    total = sum(lengths)
    spans: list[tuple[float, float, str]] = [(0.0, (total + 1) * 1e6, "outer")]
    at = 0
    for number, length in enumerate(lengths):
        spans.append((at * 1e6, (at + length) * 1e6, f"part {number}"))
        at += length
    seconds = own_seconds(spans)
    assert seconds["outer"] == pytest.approx(1)
    assert sum(seconds.values()) == pytest.approx(total + 1)
