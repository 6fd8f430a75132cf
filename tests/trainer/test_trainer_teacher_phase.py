"""Rows reach the teacher of their data source, and their columns come back in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.base.errors import DataError
from megarl.cluster.calls import PendingCall, completed_call
from megarl.data import DataProto
from megarl.models import ParallelLayout
from megarl.trainer.phases.model_passes import TeacherPhase


class Grader:
    """A teacher whose log-prob is a number plus the token; its data-parallel ranks need a whole number of rows each."""

    def __init__(self, offset: float, dp: int = 1) -> None:
        self.offset = offset
        self.layout = ParallelLayout(dp=dp)
        self.seen: list[int] = []

    def submit(self, verb: str, batch: DataProto) -> PendingCall:
        assert verb == "compute_teacher_log_prob" and len(batch) % self.layout.dp == 0
        self.seen = batch.tensors["responses"][:, 0].tolist()
        return completed_call(DataProto.from_dict({"teacher_log_prob": batch.tensors["responses"] + self.offset}))


def batch(sources: list[str] | None) -> DataProto:
    count = 5
    columns = {
        "prompts": torch.ones(count, 2, dtype=torch.int64),
        "responses": torch.arange(10, 10 + count)[:, None].repeat(1, 3),
        "attention_mask": torch.ones(count, 5, dtype=torch.int64),
    }
    return DataProto.from_dict(columns, {"data_source": np.array(sources, dtype=object)} if sources else {})


def test_rows_are_routed_by_data_source() -> None:
    teachers = {"math": Grader(0.25, dp=2), "code": Grader(0.5), "idle": Grader(0.75)}
    metrics: dict[str, float] = {}
    rows = batch(["math", "code", "math", "math", "code"])
    graded = TeacherPhase(teachers, "data_source").submit(rows, metrics).result()
    assert graded.tensors["teacher_log_prob"][:, 0].tolist() == [10.25, 11.5, 12.25, 13.25, 14.5]
    assert teachers["math"].seen[:3] == [10, 12, 13] and teachers["code"].seen == [11, 14]
    assert not teachers["idle"].seen
    assert metrics == {"distillation/rows/math": 3.0, "distillation/rows/code": 2.0, "distillation/rows/idle": 0.0}


def test_a_single_teacher_grades_every_row() -> None:
    graded = TeacherPhase({"any": Grader(0.5, dp=2)}, "data_source").submit(batch(None), {}).result()
    assert graded.tensors["teacher_log_prob"][:, 0].tolist() == [10.5, 11.5, 12.5, 13.5, 14.5]


@pytest.mark.parametrize(
    ("sources", "message"),
    [(["math", "poem", "math", "code", "poem"], r"no teacher for the rows with 'poem'"), (None, "no such column")],
)
def test_a_row_without_teacher_is_an_error(sources: list[str] | None, message: str) -> None:
    phase = TeacherPhase({"math": Grader(0.0), "code": Grader(0.0)}, "data_source")
    with pytest.raises(DataError, match=f"distillation.teacher_key=data_source: .*{message}.*math, code"):
        phase.submit(batch(sources), {})
