"""Model passes of a step (log-probs, values, teachers, updates): one role each, parallel on separate devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megarl.base.disjoint_groups import disjoint_groups
from megarl.base.errors import DataError
from megarl.base.reductions import Metrics, Total
from megarl.cluster import PlacedPool, WorkerGroup
from megarl.cluster.calls import PendingCall, completed_call
from megarl.cluster.role_groups import TeacherGroup
from megarl.data import DataProto

ROW_VERB = "compute_log_prob"
"""Row functions use the data-parallel partition of this verb, so that its columns stay on their nodes."""


@dataclass(frozen=True)
class ModelPass:
    """A pass of one role over a batch, which starts without waiting.

    Attributes:
        name: name of the phase in ``timing_s/<name>``.
        devices: pools that the pass computes on; empty if the driver computes.
        submit: starts the pass on a batch, and may add metrics; the call's result is columns, or an update's metrics.
        first_step: the first training step with this pass.
    """

    name: str
    devices: tuple[PlacedPool, ...]
    submit: Callable[[DataProto, Metrics], PendingCall]
    first_step: int = 1


def verb_pass(name: str, group: WorkerGroup, verb: str, first_step: int = 1) -> ModelPass:
    """Return the pass that runs a verb of a worker group on the batch."""
    return ModelPass(name, (group.pool,), lambda batch, metrics: group.submit(verb, batch), first_step)


def simultaneous_passes(passes: Iterable[ModelPass]) -> list[list[ModelPass]]:
    """Group independent passes: those of a group can run at the same time, because no two share devices."""
    return disjoint_groups(passes, lambda one: one.devices)


@dataclass(eq=False)
class TeacherPhase:
    """Adds the log-probs of each row's teacher.

    Args:
        teacher_key: column with that value; not read with one teacher.
    """

    teachers: Mapping[str, TeacherGroup]
    teacher_key: str

    def submit(self, batch: DataProto, metrics: Metrics) -> PendingCall:
        """Start the pass; its result is the columns of the teachers, in the order of the rows.

        Several teachers share devices: they compute one after the other, and the call is complete.

        Raises:
            DataError: no teacher has the value of a row.
        """
        if len(self.teachers) == 1:
            (teacher,) = self.teachers.values()
            return _graded(teacher, batch)
        rows_of = self._routes(batch)
        metrics |= {f"distillation/rows/{key}": Total(len(rows)) for key, rows in rows_of.items()}
        order = np.concatenate(list(rows_of.values())).argsort()
        parts = [_graded(self.teachers[key], batch[rows]).result() for key, rows in rows_of.items() if len(rows)]
        return completed_call(DataProto.concat(parts).reorder(order.tolist()))

    def _routes(self, batch: DataProto) -> dict[str, np.ndarray]:
        """Find the rows of each teacher."""
        values = batch.non_tensor_batch.get(self.teacher_key)
        check_teacher_keys(None if values is None else values.tolist(), list(self.teachers), self.teacher_key)
        assert values is not None
        return {key: np.flatnonzero(values == key) for key in self.teachers}


def check_teacher_keys(values: list[object] | None, valid: list[str], teacher_key: str) -> None:
    """Check that each row selects a teacher.

    Args:
        values: of the rows' column; None = the data have no such column.
        valid: values that select a teacher.

    Raises:
        DataError: names the values without a teacher.
    """
    field, text = f"distillation.teacher_key={teacher_key}", f"teachers have the keys {', '.join(valid)}"
    if values is None:
        raise DataError(f"{field}: the data have no such column; {text}", code="teacher.no-key-column")
    unknown = sorted({repr(value) for value in values if value not in valid})
    if unknown:
        raise DataError(
            f"{field}: no teacher for the rows with {', '.join(unknown[:5])}; {text}", code="teacher.unknown-key"
        )


def _graded(teacher: TeacherGroup, rows: DataProto) -> PendingCall:
    """Start to compute the teacher's columns; rows are padded to a multiple of its data-parallel ranks."""
    padded, added = rows.pad_to_divisor(teacher.layout.row_divisor)
    return teacher.submit("compute_teacher_log_prob", padded).then(lambda columns: columns.unpad(added))
