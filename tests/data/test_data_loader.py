import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.data import DataProto, StatefulLoader


class Numbers(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, item):
        return item


def collate(rows):
    return DataProto.from_dict({"row": torch.tensor(rows)})


def loader(rows=10, batch_size=3, seed=1, shuffle=True, drop_last=True):
    return StatefulLoader(Numbers(rows), batch_size, collate, seed, shuffle, drop_last)


def epoch(from_loader):
    return [batch.batch["row"].tolist() for batch in from_loader]


def test_file_order_and_last_batch():
    assert epoch(loader(7, shuffle=False)) == [[0, 1, 2], [3, 4, 5]]
    assert epoch(loader(7, shuffle=False, drop_last=False)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert epoch(loader(7, None, shuffle=False, drop_last=False)) == [[0, 1, 2, 3, 4, 5, 6]]
    assert len(loader(7)) == 2
    assert len(loader(7, drop_last=False)) == 3


def test_dropped_rows_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        assert loader(11, 4).dropped_per_epoch == 3
    assert "3 of 11 rows are dropped in each epoch" in caplog.text
    assert loader(11, 4, drop_last=False).dropped_per_epoch == 0
    assert loader(12, 4).dropped_per_epoch == 0


def test_epochs_are_reshuffled_reproducibly():
    first = loader(12)
    epochs = [epoch(first), epoch(first), epoch(first)]
    assert first.epoch == 3
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = loader(12)
    assert [epoch(again) for _ in range(3)] == epochs
    assert epoch(loader(12, seed=2)) not in epochs  # neighbouring seeds share no epoch


@settings(max_examples=30)
@given(st.integers(3, 12), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 11))
def test_loader_resumes_at_any_step(rows, batch_size, shuffle, drop_last, steps):
    arguments = {"rows": rows, "batch_size": min(batch_size, rows), "shuffle": shuffle, "drop_last": drop_last}
    reference = loader(**arguments)
    expected = [(reference.epoch, batch.batch["row"].tolist()) for _ in range(14) for batch in reference]

    def take(source, count):
        taken = []
        while True:
            for batch in source:
                taken.append((source.epoch, batch.batch["row"].tolist()))
                if len(taken) == count:
                    return taken

    interrupted = loader(**arguments)
    if steps:
        assert take(interrupted, steps) == expected[:steps]
    state = json.loads(json.dumps(interrupted.state_dict()))
    torch.manual_seed(rows)  # the order depends on no global generator
    resumed = loader(**arguments)
    resumed.load_state_dict(state)
    again = json.loads(json.dumps(resumed.state_dict()))  # saved once more before the first batch
    assert take(resumed, 3) == expected[steps : steps + 3]
    twice = loader(**arguments)
    twice.load_state_dict(again)
    assert take(twice, 3) == expected[steps : steps + 3]


def test_state_after_an_epoch_starts_the_next():
    source = loader(6, 3)
    iterator = iter(source)
    next(iterator), next(iterator)
    assert source.state_dict()["epoch"] == 1
    assert source.state_dict()["position"] == 0
    resumed = loader(6, 3)
    resumed.load_state_dict(source.state_dict())
    assert resumed.epoch == 1
    full = loader(6, 3)
    epoch(full)
    assert epoch(resumed) == epoch(full)


def test_global_generator_is_unchanged():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    epoch(loader())
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "change", [{"rows": 11}, {"batch_size": 4}, {"seed": 2}, {"shuffle": False}, {"drop_last": False}]
)
def test_state_of_other_data_is_rejected(change):
    source = loader()
    next(iter(source))
    (name,) = change
    with raises("resume.data-changed", f"{name}="):
        loader(**change).load_state_dict(source.state_dict())


def test_too_few_rows_are_rejected():
    with raises("data.too-few-rows") as caught:
        loader(2, 3)
    assert str(caught.value) == (
        "the data set has 2 rows, a batch needs 3; add rows, or lower data.train_batch_size [data.too-few-rows]"
    )
    with raises("data.too-few-rows", "0 rows"):
        loader(0, None, drop_last=False)
    assert epoch(loader(2, 3, shuffle=False, drop_last=False)) == [[0, 1]]
