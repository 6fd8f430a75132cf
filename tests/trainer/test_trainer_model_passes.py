"""Passes of a step are grouped by the devices of their roles, and each group runs at the same time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.expected_errors import raises

from megarl.cluster.calls import completed_call
from megarl.data import DataProto
from megarl.models import ParallelLayout
from megarl.trainer.phases.model_passes import ModelPass, TeacherPhase, simultaneous_passes, verb_pass
from megarl.trainer.roles.devices import JobPools
from megarl.trainer.roles.worker_groups import pending_device_bytes


class Group:
    """A worker group whose calls are complete at once."""

    def __init__(self, pool, pending):
        self.pool, self.pending = pool, pending

    def submit(self, verb, *args):
        return completed_call(self.pending if verb == "pending_device_bytes" else (verb, *args))


class Pool:
    """Devices without a Ray."""

    def __init__(self):
        self.processes = object()


def test_roles_on_separate_devices_run_at_the_same_time():
    shared, apart, third = Pool(), Pool(), Pool()

    def groups(**devices):
        passes = [ModelPass(name, used, lambda batch, metrics: completed_call(None)) for name, used in devices.items()]
        return [[one.name for one in group] for group in simultaneous_passes(passes)]

    assert groups(old=(shared,), ref=(shared,), values=(shared,)) == [["old"], ["ref"], ["values"]]
    assert groups(old=(shared,), ref=(apart,), values=(third,)) == [["old", "ref", "values"]]
    assert groups(old=(shared,), ref=(shared,), values=(apart,)) == [["old", "values"], ["ref"]]
    assert groups(old=(), teacher=(shared, apart), values=(apart,)) == [["old", "teacher"], ["values"]]


def test_a_pass_runs_a_verb_of_its_group_on_the_batch():
    group: Any = Group(Pool(), [])
    one = verb_pass("values", group, "compute_values", first_step=3)
    assert (one.name, one.devices, one.first_step) == ("values", (group.pool,), 3)
    assert one.submit("rows", {}).result() == ("compute_values", "rows")  # type: ignore[arg-type]


def test_engines_leave_room_for_the_roles_on_their_devices():
    """The fullest rank of each role, 3 and 20 bytes; the critic has devices of its own."""
    shared, apart = Pool(), Pool()
    actor, reference, critic = Group(shared, [3, 1]), Group(shared, [20]), Group(apart, [100, 100])
    assert pending_device_bytes(shared, [actor, reference, critic]) == 23  # type: ignore[list-item,arg-type]
    assert pending_device_bytes(Pool(), [actor, critic]) is None  # type: ignore[list-item,arg-type]


def test_processes_of_all_pools_are_watched_together():
    trainer, critic = Pool(), Pool()
    pools = JobPools(trainer, {"critic": critic})  # type: ignore[arg-type, dict-item]
    assert pools.of("critic") is critic and pools.of("reward_model") is trainer
    assert critic.processes is trainer.processes


class Grader:
    """A teacher whose log-prob is a number plus the token; its data-parallel ranks need a whole number of rows each."""

    def __init__(self, offset, dp=1):
        self.offset = offset
        self.layout = ParallelLayout(dp=dp)
        self.seen: list[int] = []

    def submit(self, verb, batch):
        assert verb == "compute_teacher_log_prob" and len(batch) % self.layout.dp == 0
        self.seen = batch.tensors["responses"][:, 0].tolist()
        return completed_call(DataProto.from_dict({"teacher_log_prob": batch.tensors["responses"] + self.offset}))


def batch(sources):
    count = 5
    columns = {
        "prompts": torch.ones(count, 2, dtype=torch.int64),
        "responses": torch.arange(10, 10 + count)[:, None].repeat(1, 3),
        "attention_mask": torch.ones(count, 5, dtype=torch.int64),
    }
    return DataProto.from_dict(columns, {"data_source": np.array(sources, dtype=object)} if sources else {})


def test_rows_are_routed_by_data_source():
    teachers = {"math": Grader(0.25, dp=2), "code": Grader(0.5), "idle": Grader(0.75)}
    metrics: dict[str, float] = {}
    rows = batch(["math", "code", "math", "math", "code"])
    graded = TeacherPhase(teachers, "data_source").submit(rows, metrics).result()
    assert graded.tensors["teacher_log_prob"][:, 0].tolist() == [10.25, 11.5, 12.25, 13.25, 14.5]
    assert teachers["math"].seen[:3] == [10, 12, 13] and teachers["code"].seen == [11, 14]
    assert not teachers["idle"].seen
    assert metrics == {"distillation/rows/math": 3.0, "distillation/rows/code": 2.0, "distillation/rows/idle": 0.0}


def test_a_single_teacher_grades_every_row():
    graded = TeacherPhase({"any": Grader(0.5, dp=2)}, "data_source").submit(batch(None), {}).result()
    assert graded.tensors["teacher_log_prob"][:, 0].tolist() == [10.5, 11.5, 12.5, 13.5, 14.5]


@pytest.mark.parametrize(
    ("sources", "code", "named"),
    [
        (["math", "poem", "math", "code", "poem"], "teacher.unknown-key", "with 'poem'; "),
        (None, "teacher.no-key-column", ""),
    ],
)
def test_a_row_without_teacher_is_an_error(sources, code, named):
    phase = TeacherPhase({"math": Grader(0.0), "code": Grader(0.0)}, "data_source")
    with raises(code, "distillation.teacher_key=data_source", named, "math, code"):
        phase.submit(batch(sources), {})
