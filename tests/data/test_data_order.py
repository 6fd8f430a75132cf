import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.data import DataProto, StatefulLoader
from megarl.data.loader import PromptQueue
from megarl.data.order import EpochOrder, MixedSet, MixtureOrder, MixtureSchedule, SamplerOrder


def mixture(*sets, batch_size=8, seed=1, shuffle=True):
    mixed = [MixedSet(f"set{at}", rows, MixtureSchedule.parse(weight)) for at, (rows, weight) in enumerate(sets)]
    return MixtureOrder(mixed, batch_size, seed, shuffle)


def loader(order, rows):
    def collate(samples):
        return DataProto.from_dict({"row": torch.tensor(samples)})

    return StatefulLoader(range(rows), None, collate, order=order)


def drawn(source, steps):
    """Rows of the next steps, over several epochs."""

    def batches():
        while True:
            for batch in source:
                yield batch.batch["row"].tolist()

    return list(islice(batches(), steps))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 5)), min_size=1, max_size=4), st.integers(1, 9))
def test_mixture_prefixes_have_exact_proportions(sets, batch_size):
    batch_size = min(batch_size, sum(rows for rows, _ in sets))
    order = mixture(*sets, batch_size=batch_size)
    rows = [row for batch in drawn(loader(order, 1000), 25) for row in batch]
    ends = np.cumsum([count for count, _ in sets])
    shares = np.array([weight for _, weight in sets]) / sum(weight for _, weight in sets)
    of_set = np.searchsorted(ends, rows, side="right")
    for end in range(1, len(rows) + 1):
        counts = np.bincount(of_set[:end], minlength=len(sets))
        assert np.abs(counts - shares * end).max() < len(sets)


def test_mixture_set_repeats_no_row_within_an_epoch():
    order = mixture((5, 3), (40, 1), batch_size=4)
    rows = [row for batch in drawn(loader(order, 1000), 20) for row in batch]
    first = [row for row in rows if row < 5]
    assert len(first) == 60
    epochs = [first[at : at + 5] for at in range(0, 60, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 6, "each epoch has an order of its own"
    assert len({row for row in rows if row >= 5}) == 20, "none of the larger set came twice"
    assert order.metrics() == {
        "data/set0/share": 0.75,
        "data/set0/epochs": 12.0,
        "data/set1/share": 0.25,
        "data/set1/epochs": 0.5,
    }


def test_mixture_epoch_has_the_rows_of_all_sets():
    source = loader(mixture((10, 1), (11, 1), batch_size=4), 21)
    assert len(source) == 5
    assert len(list(source)) == 5 and source.epoch == 1


def test_mixture_weights_by_step():
    schedule = MixtureSchedule.parse({"10": 0, 20: 1.0})
    assert [schedule.at(step) for step in (1, 10, 15, 20, 99)] == [0, 0, 0.5, 1, 1]
    order = mixture((50, 1), (50, {4: 0, 5: 3}), batch_size=4)
    counts = [sum(row >= 50 for row in batch) for batch in drawn(loader(order, 100), 8)]
    assert counts == [0, 0, 0, 0, 3, 3, 3, 3]


@settings(max_examples=25)
@given(st.integers(0, 12), st.booleans(), st.booleans())
def test_mixture_resumes_at_any_step(done, shuffle, by_parts):
    def build():
        order = mixture((7, {1: 0.2, 9: 2}), (9, 1), (4, 0.5), batch_size=3, shuffle=shuffle)
        return PromptQueue(loader(order, 20))

    size = 2 if by_parts else 3
    whole = build()
    expected = [whole.take(size).batch["row"].tolist() for _ in range(done + 6)]
    killed = build()
    for _ in range(done):
        killed.take(size)
    state = json.loads(json.dumps(killed.state_dict()))
    resumed = build()
    resumed.load_state_dict(state)
    assert [resumed.take(size).batch["row"].tolist() for _ in range(6)] == expected[done:]
    assert resumed.metrics() == whole.metrics()


def test_seeds_and_names_give_different_orders():
    one = drawn(loader(mixture((20, 1), (20, 1)), 40), 4)
    assert one == drawn(loader(mixture((20, 1), (20, 1)), 40), 4)
    assert one != drawn(loader(mixture((20, 1), (20, 1), seed=2), 40), 4)
    first = [row for batch in one for row in batch if row < 20]
    second = [row - 20 for batch in one for row in batch if row >= 20]
    assert first != second


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (-1, "data.mixture-weight"),
        ("much", "data.mixture-weight"),
        (True, "data.mixture-weight"),
        ({}, "data.mixture-weight"),
        ({1: float("nan")}, "data.mixture-weight"),
        (0, "data.mixture-zero"),
    ],
)
def test_malformed_mixture_weights_are_rejected(told, code):
    with raises(code, repr(told)):
        MixtureSchedule.parse(told)


def test_impossible_mixtures_are_rejected():
    with raises("data.mixture-zero", "step 5"):
        mixture((9, {5: 0, 9: 1}), (9, {1: 1, 5: 0}))
    with raises("data.mixture-empty", "set1"):
        mixture((9, 1), (0, 1))
    with raises("data.too-few-rows", 3, 8):
        mixture((1, 1), (2, 1))
    state = loader(mixture((9, 1), (9, 1)), 18).state_dict()
    with raises("resume.data-changed", "rows=", "'set1': 9"):
        loader(mixture((9, 1), (10, 1)), 19).load_state_dict(state)


def test_curriculum_is_sorted_then_shuffled():
    difficulty = np.array([3, 1, 2, 1, 3, 2, 1, 2, 3.0])
    source = loader(EpochOrder(9, 3, 5, difficulty=difficulty, sorted_epochs=2), 9)
    plain = loader(EpochOrder(9, 3, 5), 9)
    epochs, without = [drawn(source, 3) for _ in range(3)], [drawn(plain, 3) for _ in range(3)]
    for epoch in epochs[:2]:
        assert [sorted(batch) for batch in epoch] == [[1, 3, 6], [2, 5, 7], [0, 4, 8]]
    assert epochs[0] != epochs[1], "equal difficulties are shuffled"
    assert epochs[2] == without[2]
    with raises("resume.data-changed", "difficulty="):
        loader(EpochOrder(9, 3, 5, difficulty=difficulty + 1, sorted_epochs=2), 9).load_state_dict(source.state_dict())


class Learning:
    """A sampler that returns rows with low last scores first."""

    def __init__(self, rows):
        self.worth = [0.0] * rows
        self.order: list[int] = []

    def __len__(self):
        return len(self.worth)

    def __iter__(self):
        while True:
            if not self.order:
                self.order = sorted(range(len(self)), key=lambda row: self.worth[row])
            yield self.order.pop(0)

    def update(self, batch):
        for row in batch.batch["row"].tolist():
            self.worth[row] += row * 7 % 5

    def state_dict(self):
        return {"worth": list(self.worth), "order": list(self.order)}

    def load_state_dict(self, state):
        self.worth, self.order = list(state["worth"]), list(state["order"])


@pytest.mark.parametrize("done", range(9))
def test_stateful_sampler_resumes_at_any_step(done):
    def steps(source, count):
        found = []
        while len(found) < count:
            for batch in source:
                found.append(batch.batch["row"].tolist())
                source.update(batch)
                if len(found) == count:
                    break
        return found

    expected = steps(loader(SamplerOrder(Learning(10), 3), 10), 14)
    killed = loader(SamplerOrder(Learning(10), 3), 10)
    assert steps(killed, done) == expected[:done]
    state = json.loads(json.dumps(killed.state_dict()))
    resumed = loader(SamplerOrder(Learning(10), 3), 10)
    resumed.load_state_dict(state)
    assert steps(resumed, 5) == expected[done : done + 5]


def test_stateless_sampler_is_replayed():
    reversed_rows = list(range(7))[::-1]
    source = loader(SamplerOrder(reversed_rows, 3), 7)
    assert source.dropped_per_epoch == 1 and drawn(source, 2) == [[6, 5, 4], [3, 2, 1]]
    one = loader(SamplerOrder(reversed_rows, 3), 7)
    next(iter(one))
    other = loader(SamplerOrder(reversed_rows, 3), 7)
    other.load_state_dict(one.state_dict())
    assert drawn(other, 2) == [[3, 2, 1], [6, 5, 4]]


def test_unusable_samplers_are_rejected():
    class Forgetful(list):
        def update(self, batch):
            pass

    with raises("data.sampler-state", "Forgetful", "state_dict()"):
        SamplerOrder(Forgetful(range(9)), 3)
    with raises("data.sampler-methods", "__len__"):
        SamplerOrder(iter(range(9)), 3)
    lying = type("Lying", (), {"__len__": lambda self: 9, "__iter__": lambda self: iter(range(4))})()
    with raises("data.sampler-length", "Lying"):
        drawn(loader(SamplerOrder(lying, 3), 9), 2)
