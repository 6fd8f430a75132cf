"""Admission, composition of batches and resume of the rollout service, in random schedules without processes."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from fractions import Fraction

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.samples.ledger import AdmissionRule, GroupLedger

TENTHS = st.integers(0, 40).map(lambda tenths: tenths / 10)


def ledger(batch, staleness, samples=1, steps=None):
    total = None if steps is None else steps * batch
    return GroupLedger(AdmissionRule(batch, staleness, total), samples)


@given(st.integers(1, 50), TENTHS, st.integers(0, 9), st.integers(0, 200), st.integers(0, 200))
def test_capacity_is_the_formula_in_exact_arithmetic(batch, staleness, version, accepted, running):
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
    st.sampled_from([0.0, 0.5]),
)
def test_each_prompt_is_trained_or_dropped_once_and_within_the_bound_over_kills_at_any_moment(
    draw, size, parts, staleness, samples, kills, dropped_share
):
    """Samples end in random order, some very late. A kill loses everything since the last checkpoint.

    Groups are dropped when they end (dynamic sampling). With staleness 0 a batch is a function of the numbers.
    """
    keeps = functools.cache(lambda number: random.Random(number).random() >= dropped_share)
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
            book.sync()
            book.admit(draw.randint(0, book.capacity))
        running = [number for number in book.running if number not in slow] or book.running
        if running:
            number = draw.choice(running)
            sample = draw.choice(sorted(book.missing(number)))
            assert book.end_sample(number, sample) == (not book.missing(number))
            if not book.missing(number) and not keeps(number):
                book.drop(number)  # its slot is refilled at any time, under the weights of the engines
                book.admit(min(1, book.capacity))
        chosen = book.next_batch(size)
        if chosen is None:
            if not running:
                book.admit(book.capacity)  # an idle service admits
            continue
        assert chosen == sorted(chosen) and len(chosen) == size
        assert all(book.staleness(number) <= math.ceil(staleness) for number in chosen)
        book.train(chosen)
        trained += chosen
        in_work = book.admitted - book.trained - book.dropped
        assert in_work <= batch * (staleness + 1) + 1e-6 and book.version == len(trained) // batch
        if not book.trained % batch:
            saved = (json.dumps(book.state_dict()), list(trained))
    assert sorted(trained) == list(filter(keeps, range(book.admitted)))
    assert staleness or parts > 1 or trained == sorted(trained)
    assert book.capacity == 0 and book.untrained == []


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 5))
def test_surplus_groups_change_no_batch(draw, batch, surplus):
    """Groups that were admitted beyond a batch start again in the next version, dropped ones too.

    The batches are a function of the weights, which decide whether a group is dropped, and not of the time.
    """

    def keeps(number, version):
        return random.Random(f"{number} {version}").random() >= 0.5

    book, trained, expected = GroupLedger(AdmissionRule(batch, surplus=surplus), 1), list[int](), list[int]()
    for version in range(4):
        begin = trained[-1] + 1 if trained else 0
        varied = (number for number in itertools.count(begin) if keeps(number, version))
        expected += itertools.islice(varied, batch)
        dropped = set[int]()
        book.admit(book.capacity)
        while (chosen := book.next_batch(batch)) is None:
            number = draw.choice(book.running)
            book.end_sample(number, 0)
            if not keeps(number, version):
                book.drop(number)
                dropped.add(number)
                book.admit(book.capacity)
        book.train(chosen)
        trained += chosen
        again = book.restart([number for number in dropped if number > chosen[-1]])
        book.sync()
        assert again == book.running == list(range(chosen[-1] + 1, book.admitted))
        copy = GroupLedger(book.rule, 1)
        copy.load_state_dict(json.loads(json.dumps(book.state_dict())))
        book = copy
    assert trained == expected


@given(st.integers(1, 5), st.integers(1, 4))
def test_without_staleness_every_batch_has_the_prompts_of_its_step(batch, samples):
    book = ledger(batch, 0, samples)
    for step in range(3):
        book.sync()
        numbers = book.admit(book.capacity)
        assert numbers == list(range(step * batch, (step + 1) * batch))
        for number in reversed(numbers):
            assert book.next_batch(batch) is None
            for sample in range(samples):
                book.end_sample(number, sample)
        assert book.next_batch(batch) == numbers
        book.train(numbers)


def test_a_batch_waits_for_the_group_that_would_exceed_the_bound():
    """Batch 2, bound 1: group 0 never ends before version 1 is over, whatever else is finished."""
    book = ledger(2, 1)
    assert book.admit(4) == [0, 1, 2, 3] and book.capacity == 0
    for number in (3, 1):
        book.end_sample(number, 0)
    assert book.next_batch(2) == [1, 3]
    book.train([1, 3])
    assert book.capacity == 0  # until the engines have the weights
    book.sync()
    assert book.admit(book.capacity) == [4, 5]
    for number in (5, 4):
        book.end_sample(number, 0)
    assert book.next_batch(2) is None and book.next_batch(1) is None
    for number in (2, 0):
        book.end_sample(number, 0)
    assert book.finished == [5, 4, 2, 0] and book.next_batch(2) == [0, 2]
    with pytest.raises(ValueError, match="group 9 is not finished"):
        book.train([9])


def test_the_ledger_refuses_what_would_break_its_promises():
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
