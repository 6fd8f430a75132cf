"""The reward manager: scores a batch of responses, and masks or reports rows without a score.

A failed row never gets a zero reward: it is masked, so that it does not train, and counted.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import RewardError, StepImpossible
from megarl.base.reductions import Total
from megarl.rewards.outcome import (
    BAD_SAMPLE,
    CONVERSATION,
    INFRASTRUCTURE,
    OUTCOME,
    REWARD_COUNTS,
    TIMEOUT,
    Outcome,
    collect_extras,
    failed_outcome,
    object_column,
)
from megarl.rewards.pool.jobs import RunCounts
from megarl.rewards.scorer import Scorer, TaskBuilder
from megarl.rewards.shaping import LengthShaping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")
_EXCERPT = 2000  # characters of each part of a sample in an error message


class _RewardBatch(Protocol):
    """Interface of a batch that can be scored; ``megarl.data.DataProto`` implements and documents it."""

    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    def unpadded(self, name: str, dtype: torch.dtype | None = None) -> list[Tensor]: ...
    def row_lengths(self, name: str) -> Tensor: ...
    def packed(self, name: str, dtype: torch.dtype | None = None) -> Tensor: ...
    def with_packed(self, tokens: Mapping[str, Tensor]) -> Self: ...
    def with_ends(self, ends: Mapping[str, Tensor]) -> Self: ...
    def with_columns(self, tensors: Mapping[str, Tensor], non_tensors: Mapping[str, Any]) -> Self: ...
    def select(
        self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None
    ) -> Self: ...


BatchT = TypeVar("BatchT", bound=_RewardBatch)


class Failures(NamedTuple):
    """Rows without a score, by kind.

    Attributes:
        first_reward: description of the first row whose conversation did not fail.
    """

    rows: int = 0
    kinds: Mapping[str | None, int] = MappingProxyType({})
    first: str = ""
    first_reward: str = ""

    @classmethod
    def merged(cls, parts: Sequence[Failures]) -> Failures:
        """Add the failures of several batches."""
        return cls(
            sum(part.rows for part in parts),
            functools.reduce(operator.add, (Counter(part.kinds) for part in parts), Counter()),
            next((part.first for part in parts if part.first), ""),
            next((part.first_reward for part in parts if part.first_reward), ""),
        )


class Scored(NamedTuple, Generic[BatchT]):
    """A scored batch.

    Attributes:
        batch: the batch with ``token_level_scores``, ``response_mask`` and the extra columns.
        metrics: ``reward/failed`` (rows without a score), of these ``reward/bad_samples``, ``reward/timeouts`` and
            ``reward/infrastructure_failures``; ``reward/retries``, ``reward/processes_replaced``, and
            ``reward_extra/<name>/mean``.
        extra_columns: ``reward_failed`` (bool), ``reward_failure`` (kind of failure, None for a scored row) and
            ``reward_extra_<name>`` (extra fields of the functions, None if a row has none), object arrays ``[b]``.
    """

    batch: BatchT
    metrics: dict[str, float]
    extra_columns: dict[str, np.ndarray]
    failures: Failures = Failures()


@dataclass(frozen=True)
class FailurePolicy:
    """Treatment of rows without a score. Masked rows do not train.

    Attributes:
        on_error: for a function that raised or returned no number: ``raise`` stops at the first such row and shows it,
            ``mask`` masks the row. Timeouts and infrastructure failures are always masked.
        max_failure_ratio: share of masked rows (without failed conversations) above which scoring stops.

    Raises:
        RewardError: ``on_error`` is unknown.
    """

    on_error: str = "raise"
    max_failure_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            text = f"reward.on_error={self.on_error} must be one of {', '.join(ON_ERROR)}"
            raise RewardError(text, code="reward.unknown-on-error")


class ScoringStopped(RewardError, StepImpossible):
    """A row failed under ``on_error=raise``, or too many rows failed."""


class RewardManager:
    """Scores the rows of a batch with reward functions.

    A row fails if a function raises, returns no finite number or takes too long, or if the response has no token. A row
    with a failed conversation (column ``agent_error``) is masked, counted, and not scored. The manager is a context
    manager: its processes end with the block.

    Args:
        starts_processes: start processes when the block is entered; False: when a row has to be scored.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        policy: FailurePolicy | None = None,
        shaping: LengthShaping | None = None,
        starts_processes: bool = True,
    ) -> None:
        self.scorer = scorer
        self.tasks = TaskBuilder(tokenizer, scorer.wants_prompt)
        self.policy = policy or FailurePolicy()
        self.shaping = shaping or LengthShaping()
        self.starts_processes = starts_processes

    def __enter__(self) -> Self:
        if self.starts_processes:
            self.scorer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.scorer.close()

    def score(self, batch: BatchT, *, check: bool = True) -> Scored[BatchT]:
        """Score every row, at the last response token; all other entries of the scores are 0.

        Rows with an outcome in the column :data:`~megarl.rewards.outcome.OUTCOME` keep it; the others are scored now.

        Args:
            check: check the number of failed rows; False = the caller passes the failures of several batches to
                :meth:`check`.

        Raises:
            RewardError: a column is missing.
            ScoringStopped: a row failed under ``raise``, or too many rows failed.
        """
        _require_columns(batch)
        samples = _Samples(batch)
        outcomes, counts = self._outcomes(samples, batch.meta_info.pop(REWARD_COUNTS, RunCounts()))
        failures = self._failures(samples, outcomes)
        if check:
            self.check([failures])

        kept = torch.tensor([outcome.failure is None for outcome in outcomes], dtype=torch.bool)
        scores = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        batch = with_scores(batch, scores, kept)

        metrics, extras = collect_extras([outcome.extras for outcome in outcomes])
        metrics |= _failure_metrics(outcomes, counts)
        extras["reward_failed"] = (~kept).numpy().astype(object)
        extras["reward_failure"] = object_column([outcome.kind for outcome in outcomes])
        kept_columns = [name for name in batch.non_tensor_batch if name != OUTCOME]
        return Scored(batch.select(None, kept_columns).with_columns({}, extras), metrics, extras, failures)

    def _outcomes(self, samples: _Samples, counts: RunCounts) -> tuple[list[Outcome], RunCounts]:
        """Return the outcome of each row, and the retries and replacements, those of ``counts`` included."""
        present = enumerate(samples.columns.get(OUTCOME, ()))
        outcomes: dict[int, Outcome] = {row: outcome for row, outcome in present if outcome is not None}
        lengths = samples.lengths
        for row, length in enumerate(lengths):
            if outcome := _unscorable(samples.columns, row, length):
                outcomes[row] = outcome
        rows = [row for row in range(len(lengths)) if row not in outcomes]
        results: list[Outcome] = []
        if rows:
            tasks = []
            for row in rows:
                columns = {name: column[row] for name, column in samples.columns.items()}
                tasks.append(self.tasks.build(row, columns, samples.prompts[row], samples.responses[row]))
            results, late_counts = self.scorer.score(tasks)
            counts = counts.plus(late_counts)
        outcomes |= dict(zip(rows, results, strict=True))
        ordered = [outcomes[row] for row in range(len(lengths))]
        groups = samples.columns.get("uid")
        return self.shaping.apply(ordered, lengths, None if groups is None else groups.tolist()), counts

    def _failures(self, samples: _Samples, outcomes: Sequence[Outcome]) -> Failures:
        """Count the rows without a score.

        Raises:
            ScoringStopped: a row failed under ``raise``.
        """
        failures = [(row, outcome) for row, outcome in enumerate(outcomes) if outcome.failure is not None]
        for row, outcome in failures:
            if outcome.kind == BAD_SAMPLE and self.policy.on_error == "raise":
                sample = self._describe(samples, row, outcome)
                raise ScoringStopped(f"{sample}\n  (reward.on_error=mask masks it)", code="reward.row-failed")
        rewards = [(row, outcome) for row, outcome in failures if outcome.kind != CONVERSATION]
        first, first_reward = (self._describe(samples, *rows[0]) if rows else "" for rows in (failures, rewards))
        return Failures(len(outcomes), Counter(outcome.kind for _, outcome in failures), first, first_reward)

    def check(self, parts: Sequence[Failures]) -> None:
        """Check the number of failed rows; log it.

        Raises:
            ScoringStopped: no row was scored, or too many rows failed.
        """
        total = Failures.merged(parts)
        failed = sum(total.kinds.values())
        if not failed:
            return
        if failed == total.rows:
            text = f"none of {total.rows} rows could be scored; the first: {total.first}"
            raise ScoringStopped(text, code="reward.no-row-scored")
        failed_rewards = failed - total.kinds.get(CONVERSATION, 0)
        if failed_rewards > self.policy.max_failure_ratio * total.rows:
            kinds = ", ".join(f"{total.kinds.get(kind, 0)} {name}" for kind, name in _KINDS.items())
            raise ScoringStopped(
                f"{failed_rewards} of {total.rows} rows could not be scored ({kinds}), more than "
                f"reward.max_failure_ratio={self.policy.max_failure_ratio:g} allows; the first: {total.first_reward}",
                code="reward.too-many-failures",
            )
        logger.warning("masked %d of %d rows; the first: %s", failed, total.rows, total.first)

    def _describe(self, samples: _Samples, row: int, outcome: Outcome) -> str:
        """Describe the sample and the cause, so that the failure can be reproduced by hand."""
        if outcome.kind == CONVERSATION:
            return f"the conversation of row {row} failed: {outcome.failure}"
        parts = {
            "data_source": samples.columns["data_source"][row],
            "prompt": self.tasks.text(samples.prompts[row]),
            "solution_str": self.tasks.text(samples.responses[row]),
            "ground_truth": samples.columns["reward_model"][row]["ground_truth"],
        }
        sample = "\n".join(f"  {name}: {_excerpt(repr(value))}" for name, value in parts.items())
        return f"the reward of row {row} failed: {outcome.failure}\n{sample}"


class NullReward:
    """Reward manager without a reward function, for runs with a reward model only: every score is 0.

    It masks the rows that cannot be scored: failed conversations and responses without a token.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """No process to end."""

    def check(self, parts: Sequence[Failures]) -> None:
        """Do nothing: the reward model scores the rows."""

    def score(self, batch: BatchT, *, check: bool = True) -> Scored[BatchT]:
        """Return the batch with ``token_level_scores`` of zeros, ``response_mask`` and ``reward_failed``.

        Args:
            check: raise if no row can be scored.

        Raises:
            RewardError: no row can be scored.
        """
        kept = batch.row_lengths("responses") > 0
        errors = batch.non_tensor_batch.get("agent_error")
        if errors is not None:
            kept &= torch.tensor([error is None for error in errors], dtype=torch.bool)
        if check and not kept.any():
            text = f"none of {len(kept)} rows could be scored: none has a response, or all conversations failed"
            raise RewardError(text, code="reward.no-row-scored")
        batch = with_scores(batch, torch.zeros(len(kept)), kept)
        extras = {"reward_failed": (~kept).numpy().astype(object)}
        return Scored(batch.with_columns({}, extras), {"reward/failed": Total((~kept).sum())}, extras)


_KINDS = {
    BAD_SAMPLE: "raised or returned no number",
    TIMEOUT: "timed out",
    INFRASTRUCTURE: "had an infrastructure failure",
}


def _failure_metrics(outcomes: Sequence[Outcome], counts: RunCounts) -> dict[str, float]:
    kinds = [outcome.kind for outcome in outcomes]
    return {
        "reward/failed": Total(sum(outcome.failure is not None for outcome in outcomes)),
        "reward/bad_samples": Total(kinds.count(BAD_SAMPLE)),
        "reward/timeouts": Total(kinds.count(TIMEOUT)),
        "reward/infrastructure_failures": Total(kinds.count(INFRASTRUCTURE)),
        "reward/retries": Total(counts.retries),
        "reward/processes_replaced": Total(counts.replaced),
    }


class _Samples:
    """The samples of a batch: columns, lengths, and token ids without padding, which are read if a row needs them."""

    def __init__(self, batch: _RewardBatch) -> None:
        self._batch = batch
        self.columns = batch.non_tensor_batch
        self.lengths: list[int] = batch.row_lengths("responses").tolist()

    @functools.cached_property
    def prompts(self) -> list[np.ndarray]:
        """Token ids of each prompt."""
        return [ids.numpy() for ids in self._batch.unpadded("prompts")]

    @functools.cached_property
    def responses(self) -> list[np.ndarray]:
        """Token ids of each response."""
        return [ids.numpy() for ids in self._batch.unpadded("responses")]


def with_scores(batch: BatchT, scores: Tensor, kept: Tensor) -> BatchT:
    """Return the batch with scores at the last response tokens, and a mask that leaves out failed rows.

    Args:
        batch: samples; ``response_mask`` defaults to all response tokens.
        scores: ``[b]`` float32.
        kept: ``[b]`` bool, rows with a score.
    """
    batch = batch.with_ends({"token_level_scores": torch.where(kept, scores, 0.0)})
    masked = "response_mask" in batch.tensors
    if masked and bool(kept.all()):
        return batch
    lengths: list[int] = batch.row_lengths("responses").tolist()
    mask = batch.packed("response_mask", torch.bool).clone() if masked else torch.ones(sum(lengths), dtype=torch.bool)
    for tokens, keep in zip(mask.split(lengths), kept.tolist(), strict=True):
        if not keep:
            tokens.zero_()
    return batch.with_packed({"response_mask": mask})


def _unscorable(columns: Mapping[str, np.ndarray], row: int, length: int) -> Outcome | None:
    """Outcome of a row with a failed conversation or an empty response; None for all other rows."""
    errors = columns.get("agent_error")
    if errors is not None and errors[row] is not None:
        return failed_outcome(CONVERSATION, str(errors[row]))
    if length == 0:
        return failed_outcome(BAD_SAMPLE, "the response has no token, so nothing could carry a score")
    return None


def _require_columns(batch: _RewardBatch) -> None:
    present = {*batch.tensors, *batch.non_tensor_batch}
    missing = {"prompts", "responses", "attention_mask", "data_source", "reward_model"} - present
    if missing:
        text = f"a batch needs {sorted(missing)} to be scored; it has {sorted(present)}"
        raise RewardError(text, code="reward.missing-column")


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT // 2]} ... {text[-_EXCERPT // 2 :]}"
