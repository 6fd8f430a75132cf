import pytest
import torch

from megarl.data import DataProto
from megarl.workers.dispatch import Dispatch, VerbMark, read_marks, verb


class Base:
    @verb(Dispatch.SPLIT, mini_batches="mini_batch_rows", phase="update_actor")
    def update(self, batch):
        return batch + 1

    @verb(Dispatch.SPLIT, columns=("prompts",))
    def answer(self, batch):
        return batch

    @verb(Dispatch.ONE)
    def save(self):
        return "saved"

    def helper(self):
        return None


class Derived(Base):
    def update(self, batch):
        return batch + 2

    @verb(Dispatch.ALL)
    def save(self):
        return "all saved"


def test_mark_changes_nothing_about_the_call():
    assert Base().update(1) == 2
    assert Derived().update(1) == 3


def test_marks_by_name_and_phase_defaults_to_the_name():
    assert read_marks(Base) == {
        "update": VerbMark(Dispatch.SPLIT, "mini_batch_rows", "update_actor", equal_rows=True),
        "answer": VerbMark(Dispatch.SPLIT, None, "answer", ("prompts",)),
        "save": VerbMark(Dispatch.ONE, None, "save"),
    }


def test_override_keeps_the_mark_unless_it_has_one():
    marks = read_marks(Derived)
    assert marks["update"].dispatch is Dispatch.SPLIT
    assert marks["save"].dispatch is Dispatch.ALL


def test_mini_batches_need_split():
    with pytest.raises(ValueError, match="needs Dispatch"):
        verb(Dispatch.ALL, mini_batches="mini_batch_rows")
    with pytest.raises(ValueError, match="needs Dispatch"):
        verb(Dispatch.ALL, equal_rows=True)


def test_verb_receives_the_present_columns_it_reads():
    batch = DataProto.from_dict(
        {"prompts": torch.zeros(1, 2, dtype=torch.int64), "values": torch.zeros(1, 3)}, {"uid": ["a"], "raw": ["b"]}
    )
    read = verb(Dispatch.SPLIT, columns=("prompts", "uid", "absent"))(lambda self: None)
    (mark,) = vars(read).values()
    assert set(mark.read(batch).tensors) == {"prompts"} and set(mark.read(batch).non_tensor_batch) == {"uid"}
    assert read_marks(Base)["update"].read(batch) is batch
