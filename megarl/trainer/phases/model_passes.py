"""Model passes of a step (log-probs, values, teachers, updates), parallel on separate devices; ReprAlign's pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import Moments, WeightSchedule, row_cosine_similarity
from megarl.base.disjoint_groups import disjoint_groups
from megarl.base.errors import DataError
from megarl.base.reductions import Metrics, Total
from megarl.cluster.calls import PendingCall, completed_call
from megarl.cluster.resources import PlacedPool
from megarl.cluster.role_groups import ReferenceGroup, TeacherGroup
from megarl.cluster.worker_group import WorkerGroup
from megarl.data import DataProto, attention_mask_of, pad_right, sequence_lengths
from megarl.data.images import IMAGES
from megarl.data.remote_columns import RowMap, map_in_process
from megarl.data.tokenizers import cut_middle, measured_tokens
from megarl.workers.row_math import MASKS, counted_rows, entropy_of_rows, summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_VERB = "compute_log_prob"
"""Row functions use the data-parallel partition of this verb, so that its columns stay on their nodes."""
COMPARED_COLUMNS = ("prompts", "responses", "attention_mask", "response_mask")


class BatchPhase(Protocol):
    """An optional phase of a training step, selected when the trainer is built."""

    @property
    def name(self) -> str:
        """Name of the phase in ``timing_s/<name>``."""

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return whether the phase runs in this step."""

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Return the batch with the columns of the phase; add its statistics to ``metrics``."""


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


class GroundTruths(NamedTuple):
    """Ground truths as responses to their prompts, each pair once.

    Attributes:
        batch: one row per ground truth, with :data:`COMPARED_COLUMNS`; None if there is none.
        of_row: ``[b]``, for each row of the step its row in ``batch``; -1 for an empty ground truth.
        num_truncated: ground truths that were truncated to the maximum response length.
    """

    batch: DataProto | None
    of_row: np.ndarray
    num_truncated: int


@dataclass(eq=False)
class AlignmentPhase:
    """Adds the cosine similarity of each response and its ground truth in the reference's representation space.

    Args:
        schedule: weight of the bonus by step; a step with weight 0 skips the phase.
        entropy_threshold: mean entropy, in nats, above which the phase runs.
    """

    reference: ReferenceGroup
    schedule: WeightSchedule
    entropy_threshold: float
    tokenizer: PreTrainedTokenizerBase
    max_response_length: int
    rows: RowMap = map_in_process
    name: ClassVar[str] = "repr_align"

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return whether the bonus has a weight in this step and the policy's mean entropy is above the threshold."""
        if self.schedule.weight(step) == 0:
            return False
        _, parts = self.rows(entropy_of_rows, (*MASKS, "entropys"), batch)
        return Moments.merged(parts).mean > self.entropy_threshold

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Add ``ref_similarity [b]``: cosine between the representations of response and ground truth.

        Both are means of the reference's final hidden states after the same prompt: over the trained tokens of the
        response, and over all tokens of the ground truth.
        """
        trained = counted_rows(batch)
        truths = self._ground_truths(batch)
        similarity = torch.zeros(len(batch))
        compared = trained & torch.from_numpy(truths.of_row >= 0)
        if truths.batch is not None and compared.any():
            responses = batch.present((*COMPARED_COLUMNS, IMAGES))
            vectors = self._representations(DataProto.concat([responses, truths.batch]))
            partners = vectors[len(batch) :][torch.from_numpy(truths.of_row)[compared]]
            similarity[compared] = row_cosine_similarity(vectors[: len(batch)][compared], partners).float()
        metrics |= summary("repr_align/similarity", similarity[compared])
        metrics["repr_align/empty_ground_truths"] = Total((trained & ~compared).sum())
        metrics["repr_align/cut_ground_truths"] = Total(truths.num_truncated)
        return batch.with_columns({"ref_similarity": similarity}, {})

    def _representations(self, batch: DataProto) -> Tensor:
        """Compute ``[b, hidden]`` of all rows, padded to a multiple of the reference's data-parallel ranks."""
        padded, added = batch.pad_to_divisor(self.reference.layout.row_divisor)
        return self.reference.compute_ref_representations(padded).unpad(added).tensors["representations"]

    def _ground_truths(self, batch: DataProto) -> GroundTruths:
        prompts, models = batch.padded("prompts"), batch.non_tensor_batch["reward_model"]
        prompt_lengths = sequence_lengths(batch)[0].tolist()
        numbers, enough = dict[tuple[bytes, str], int](), measured_tokens(self.max_response_length)
        of_row, first, tokens, num_truncated = np.full(len(batch), -1), [], [], 0
        for row, model in enumerate(models):
            text = cut_middle(self.tokenizer, ground_truth_text(model["ground_truth"]), enough)
            ids = self.tokenizer.encode(text, add_special_tokens=False) if text else []
            if not ids:
                continue
            key = (prompts[row].numpy().tobytes(), text)
            if key not in numbers:
                numbers[key] = len(numbers)
                first.append(row)
                tokens.append(ids[: self.max_response_length])
                num_truncated += len(ids) > self.max_response_length
            of_row[row] = numbers[key]
        if not tokens:
            return GroundTruths(None, of_row, num_truncated)
        lengths, widest = [len(ids) for ids in tokens], max(map(len, tokens))
        mask = attention_mask_of([prompt_lengths[row] for row in first], lengths, prompts.shape[1], widest)
        columns = {
            "prompts": prompts[first],
            "responses": pad_right(tokens),
            "attention_mask": mask.to(batch.tensors.shapes["attention_mask"].dtype),
            "response_mask": mask[:, prompts.shape[1] :].to(batch.tensors.shapes["response_mask"].dtype),
        }
        of_prompts = batch.non_tensor_batch
        images = {IMAGES: [of_prompts[IMAGES][row] for row in first]} if IMAGES in of_prompts else {}
        return GroundTruths(DataProto.from_dict(columns, images), of_row, num_truncated)


def ground_truth_text(truth: Any) -> str:
    """Convert a ground truth to text: ``target`` of a mapping, the first entry of a list, else ``str``.

    Returns:
        The text; empty for None, an empty list, or white space only.
    """
    if isinstance(truth, Mapping) and "target" in truth:
        truth = truth["target"]
    if isinstance(truth, list | tuple | np.ndarray):
        return ground_truth_text(truth[0]) if len(truth) else ""
    text = "" if truth is None else str(truth)
    return text if text.strip() else ""
