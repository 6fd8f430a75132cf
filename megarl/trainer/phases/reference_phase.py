"""Pass over the reference policy's representations: similarity of responses to the ground truth (ReprAlign)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import Moments, WeightSchedule, row_cosine_similarity
from megarl.base.reductions import Metrics, Total
from megarl.cluster.role_groups import ReferenceGroup
from megarl.data import DataProto, attention_mask_of, pad_right, sequence_lengths
from megarl.data.row_map import RowMap, map_in_process
from megarl.data.text_bounds import cut_middle, measured_tokens
from megarl.workers.row_math import MASKS, counted_rows, entropy_of_rows, summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        """Add ``ref_similarity [b]``: cosine of the representations of the response and of the ground truth.

        Both are means of the reference's final hidden states after the same prompt: over the trained tokens of the
        response, and over all tokens of the ground truth.
        """
        trained = counted_rows(batch)
        truths = self._ground_truths(batch)
        similarity = torch.zeros(len(batch))
        compared = trained & torch.from_numpy(truths.of_row >= 0)
        if truths.batch is not None and compared.any():
            responses = batch.select(COMPARED_COLUMNS, ())
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
        return GroundTruths(DataProto.from_dict(columns), of_row, num_truncated)


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
