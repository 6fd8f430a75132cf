"""Admission, composition of batches and resume of the rollout service, in random schedules without processes."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import pytest
from expected_errors import raises
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megarl.agents.types import SampleId, VersionSpan
from megarl.trainer.rollout_service.ledger import AdmissionRule, GroupLedger
from megarl.trainer.state.replay_order import OrderedBatch, OrderFile, ReplayOrder, read_order

TENTHS = st.integers(0, 40).map(lambda tenths: tenths / 10)


def ledger(batch: int, staleness: float, samples: int = 1, steps: int | None = None) -> GroupLedger:
    total = None if steps is None else steps * batch
    return GroupLedger(AdmissionRule(batch, staleness, total), samples)


@given(st.integers(1, 50), TENTHS, st.integers(0, 9), st.integers(0, 200), st.integers(0, 200))
def test_capacity_is_the_formula_in_exact_arithmetic(
    batch: int, staleness: float, version: int, accepted: int, running: int
) -> None:
    exact = (Fraction(str(staleness)) + version + 1) * batch - (accepted + running)
    assert AdmissionRule(batch, staleness).capacity(version, accepted, running) == max(0, math.floor(exact))


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.integers(1, 4),
    TENTHS,
    st.integers(1, 3),
    st.booleans(),
)
def test_each_prompt_is_trained_once_and_within_the_bound_over_kills_at_any_moment(
    draw: random.Random, size: int, parts: int, staleness: float, samples: int, kills: bool
) -> None:
    """Samples end in random order, some very late. A kill loses everything since the last checkpoint."""
    steps, batch = 6, size * parts
    book = ledger(batch, staleness, samples, steps)
    trained: list[int] = []
    saved = (json.dumps(book.state_dict()), [])
    slow = set(draw.sample(range(steps * batch), batch // 2))  # end when nothing else can
    while len(trained) < steps * batch:
        if kills and draw.random() < 0.02:
            book = ledger(batch, staleness, samples, steps)
            book.load_state_dict(json.loads(saved[0]))
            trained = list(saved[1])
        if not book.trained % batch:
            book.admit(draw.randint(0, book.capacity))
        running = [number for number in book.running if number not in slow] or book.running
        if running:
            number = draw.choice(running)
            sample = draw.choice(sorted(book.missing(number)))
            assert book.end_sample(number, sample) == (not book.missing(number))
        chosen = book.next_batch(size)
        if chosen is None:
            if not running:
                book.admit(book.capacity)  # an idle service admits
            continue
        assert chosen == sorted(chosen) and len(chosen) == size
        assert all(book.staleness(number) <= math.ceil(staleness) for number in chosen)
        book.train(chosen)
        trained += chosen
        in_work = book.admitted - book.trained
        assert in_work <= batch * (staleness + 1) + 1e-6 and book.version == len(trained) // batch
        if not book.trained % batch:
            saved = (json.dumps(book.state_dict()), list(trained))
    assert sorted(trained) == list(range(steps * batch))
    assert book.capacity == 0 and book.untrained == []


@given(st.integers(1, 5), st.integers(1, 4))
def test_without_staleness_every_batch_has_the_prompts_of_its_step(batch: int, samples: int) -> None:
    book = ledger(batch, 0, samples)
    for step in range(3):
        numbers = book.admit(book.capacity)
        assert numbers == list(range(step * batch, (step + 1) * batch))
        for number in reversed(numbers):
            assert book.next_batch(batch) is None
            for sample in range(samples):
                book.end_sample(number, sample)
        assert book.next_batch(batch) == numbers
        book.train(numbers)


def test_a_batch_waits_for_the_group_that_would_exceed_the_bound() -> None:
    """Batch 2, bound 1: group 0 never ends before version 1 is over, whatever else is finished."""
    book = ledger(2, 1)
    assert book.admit(4) == [0, 1, 2, 3] and book.capacity == 0
    for number in (3, 1):
        book.end_sample(number, 0)
    assert book.next_batch(2) == [1, 3]
    book.train([1, 3])
    assert book.admit(book.capacity) == [4, 5]
    for number in (5, 4):
        book.end_sample(number, 0)
    assert book.next_batch(2) is None and book.next_batch(1) is None
    for number in (2, 0):
        book.end_sample(number, 0)
    assert book.finished == [5, 4, 2, 0] and book.next_batch(2) == [0, 2]
    with pytest.raises(ValueError, match="group 9 is not finished"):
        book.train([9])


def test_the_ledger_refuses_what_would_break_its_promises() -> None:
    book = ledger(2, 0)
    with pytest.raises(ValueError, match="3 prompts exceed the capacity of 2"):
        book.admit(3)
    book.admit(2)
    book.end_sample(0, 0)
    with pytest.raises(KeyError):
        book.end_sample(0, 0)
    with raises("resume.batch-sizes", "data.train_batch_size=4", "a run with 2"):
        ledger(4, 0).load_state_dict(book.state_dict())
    stale = ledger(2, 3)
    stale.admit(8)
    with raises("resume.staleness-bound", "async_training.max_staleness=0"):
        ledger(2, 0).load_state_dict(stale.state_dict())


def test_the_order_of_batches_survives_a_resume_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "batch_order.jsonl"
    first = OrderFile(path)
    for batch, groups in enumerate([[0, 2], [1, 3], [5, 6]]):
        first.add(batch, OrderedBatch(groups, None))
    resumed = OrderFile(path, 2)  # the third batch was trained after the checkpoint
    resumed.add(2, OrderedBatch([4, 5], None))
    order = ReplayOrder(str(path), partial_rollout=False)
    assert [order.groups(batch) for batch in range(3)] == [[0, 2], [1, 3], [4, 5]]
    assert order.spans(SampleId(0, 0)) == []
    with raises("async.replay-too-short", path, "batch 3"):
        order.groups(3)
    with raises("async.replay-partial-rollout", path, "async_training.partial_rollout=false"):
        ReplayOrder(str(path), partial_rollout=True)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"batch": 3, "gro')  # a killed process
    assert list(read_order(path)) == [0, 1, 2]
    path.write_text('{"batch": 0}\n{"batch": 1, "groups": [1]}\n', encoding="utf-8")
    with raises("async.replay-bad-line", path, "line 1"):
        ReplayOrder(str(path), partial_rollout=False)
    assert OrderFile(path) and not path.read_text(encoding="utf-8")


def test_the_order_file_has_the_versions_of_interrupted_responses(tmp_path: Path) -> None:
    path, spans = tmp_path / "batch_order.jsonl", [VersionSpan(3, 17), VersionSpan(4, 5)]
    order = OrderFile(path)
    order.add(0, OrderedBatch([6, 2], [[[], spans], [spans[1:], []]]))
    order.add(1, OrderedBatch([3], [[spans[:1], spans[:1]]]))
    resumed = OrderFile(path, 1)
    resumed.add(1, OrderedBatch([4], [[spans, []]]))
    replay = ReplayOrder(str(path), partial_rollout=True)
    assert replay.groups(0) == [6, 2] and replay.groups(1) == [4]
    names = [(6, 0), (6, 1), (2, 0), (4, 0), (3, 0), (9, 0)]
    assert [replay.spans(SampleId(*name)) for name in names] == [[], spans, spans[1:], spans, [], []]
    with raises("async.replay-partial-rollout", path, "async_training.partial_rollout=true"):
        ReplayOrder(str(path), partial_rollout=False)
    path.write_text(
        '{"batch": 0, "groups": [1, 2], "versions": [[[]]]}\n{"batch": 1, "groups": [1]}\n', encoding="utf-8"
    )
    with raises("async.replay-bad-line", path, "line 1"):
        read_order(path)
