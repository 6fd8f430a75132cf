import threading
import time

import pytest

from megarl.tracing import PHASE, TRACER, counter, lane_span, past_span, span, unwatch_process
from megarl.tracing.tracer import MISSING_EVENTS


@pytest.fixture
def recording():
    TRACER.recording = True
    TRACER.follow_thread()  # an earlier test may have followed the thread of an engine
    yield TRACER
    unwatch_process()


def test_spans_have_start_and_duration_in_order_of_their_ends(recording):
    before = time.monotonic_ns()
    with span("outer", "verb", rows=3), span("inner"):
        time.sleep(0.01)
    after = time.monotonic_ns()
    inner, outer = recording.take()
    assert (inner.name, outer.name, outer.category, outer.args) == ("inner", "outer", "verb", {"rows": 3})
    assert before <= outer.start_ns <= inner.start_ns
    assert inner.start_ns + inner.duration_ns <= outer.start_ns + outer.duration_ns <= after
    assert inner.duration_ns >= 10_000_000
    assert recording.take() == []


def test_span_ends_and_propagates_an_exception(recording):
    with pytest.raises(ValueError, match="no"), span("fails"):
        raise ValueError("no")
    assert [event.name for event in recording.take()] == ["fails"]
    assert recording.stack == []


def test_threads_have_separate_lanes(recording):
    def work():
        with span("aside"):
            assert [name for name, *_ in recording.stack] == ["in main"]

    thread = threading.Thread(target=work, name="saver")
    with span("in main"):
        thread.start()
        thread.join()
    assert [(event.name, event.lane) for event in recording.take()] == [("aside", "saver"), ("in main", "")]


def test_counters_and_past_spans(recording):
    counter("memory", host=1.5)
    begin = time.monotonic_ns() - 5_000_000
    past_span("request", "rollout", begin, "place 3", tokens=7)
    number, request = recording.take()
    assert (number.kind, number.args) == ("C", {"host": 1.5})
    assert (request.kind, request.lane, request.args) == ("X", "place 3", {"tokens": 7})
    assert 5_000_000 <= request.duration_ns <= time.monotonic_ns() - begin


def test_no_events_are_kept_without_recording():
    assert not TRACER.active
    with span("unseen", rows=1):
        counter("unseen", value=1)
    assert TRACER.take() == []
    assert span("one") is span("other"), "no object is made"


def test_events_beyond_the_limit_are_counted(recording, monkeypatch):
    monkeypatch.setattr("megarl.tracing.tracer.MOST_EVENTS", 2)
    for _ in range(5):
        with span("one"):
            pass
    one, other, last = recording.take()
    assert (one.name, other.name) == ("one", "one")
    assert (last.name, last.category) == ("events left out: 3 more than 2 between two collections", MISSING_EVENTS)


def test_spans_that_begin_together_end_in_any_order(recording):
    """The watchdog reads the innermost span that runs."""
    critic, actor = (lane_span(name, PHASE, name) for name in ("update_critic", "update_actor"))
    with span("step", PHASE):
        critic.__enter__()
        actor.__enter__()
        assert [name for name, *_ in recording.stack] == ["step", "update_critic", "update_actor"]
        critic.__exit__(None, None, None)
        assert [name for name, *_ in recording.stack] == ["step", "update_actor"]
        actor.__exit__(None, None, None)
    first, second, step = recording.take()
    assert [(event.name, event.lane) for event in (first, second, step)] == [
        ("update_critic", "update_critic"),
        ("update_actor", "update_actor"),
        ("step", ""),
    ]
    assert recording.stack == [] and {"update_critic", "update_actor"} <= recording.completed
