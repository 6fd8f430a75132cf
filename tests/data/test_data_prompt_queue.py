"""Prompt queue: no row is repeated or lost, also after a restart."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.data import DataProto, StatefulLoader
from megarl.data.loader import PromptQueue

PORTIONS = st.lists(st.integers(1, 11), min_size=1, max_size=8)


def loader(seed=5):
    """11 rows in batches of 3 with two dropped: three batches per epoch."""

    def collate(rows):
        return DataProto.from_dict({"row": torch.tensor(rows)})

    return StatefulLoader(list(range(11)), 3, collate, seed=seed)


def rows(batch):
    return batch.tensors["row"].tolist()


def in_order(count):
    """The first rows of all epochs in the loader's order."""
    source, found = loader(), []
    while len(found) < count:
        found += [row for batch in source for row in rows(batch)]
    return found[:count]


@settings(max_examples=30)
@given(PORTIONS, st.integers(0, 7))
@example([1, 1, 1, 4, 1], 4)  # the restart is within the last batch of an epoch
def test_take_returns_rows_in_order_after_a_restart(portions, stop):
    queue, found = PromptQueue(loader()), []
    for number, count in enumerate(portions):
        if number == stop:
            saved, queue = queue.state_dict(), PromptQueue(loader())
            queue.load_state_dict(saved)
            assert queue.state_dict() == saved
        part = rows(queue.take(count))
        assert len(part) == count
        found += part
    assert found == in_order(sum(portions))
    assert queue.epoch == (sum(portions) - 1) // 9 and len(queue) == 3


def test_complete_batches_keep_the_loader_state():
    queue, source = PromptQueue(loader()), loader()
    for batch, _ in zip(source, range(2), strict=False):
        assert rows(queue.take(3)) == rows(batch)
        assert queue.state_dict() == source.state_dict()


def test_state_of_other_data_is_rejected():
    queue = PromptQueue(loader())
    queue.take(4)
    with raises("resume.data-changed") as caught:
        PromptQueue(loader(seed=6)).load_state_dict(queue.state_dict())
    assert str(caught.value) == (
        "the saved loader state has seed=5, this run has 6; resume with the same data, batch size and seed, or start a "
        "new run with trainer.resume_mode=disable [resume.data-changed]"
    )
