"""The reward manager: scores a batch of responses, and masks or reports rows without a score.

A failed row never gets a zero reward: it is masked, so that it does not train, and counted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import RewardError, StepImpossible
from megarl.rewards.calling import RewardTask
from megarl.rewards.outcome import (
    BAD_SAMPLE,
    CONVERSATION,
    INFRASTRUCTURE,
    TIMEOUT,
    Outcome,
    collect_extras,
    failed_outcome,
    object_column,
)
from megarl.rewards.pool.jobs import RunCounts
from megarl.rewards.rules.agent_score import AGENT_RESULT
from megarl.rewards.scorer import Scorer, ScoreStream
from megarl.rewards.shaping import LengthShaping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")
_EXCERPT = 2000  # characters of each part of a sample in an error message


class RewardBatch(Protocol):
    """Interface of a batch that can be scored; ``megarl.data.DataProto`` implements it."""

    non_tensor_batch: dict[str, np.ndarray]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensor columns by name."""

    def unpadded(self, name: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the entries of each row of a column."""

    def packed(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the entries of all rows of a column in order."""

    def with_packed(self, tokens: Mapping[str, Tensor]) -> Self:
        """Return the batch with response-aligned columns added or replaced, from packed values."""

    def with_ends(self, ends: Mapping[str, Tensor]) -> Self:
        """Return the batch with response-aligned columns that are zero except at the last token of each row."""

    def with_columns(self, tensors: Mapping[str, Tensor], non_tensors: Mapping[str, Any]) -> Self:
        """Return the batch with columns added or replaced."""


BatchT = TypeVar("BatchT", bound=RewardBatch)
TokenIds: TypeAlias = Sequence[int] | np.ndarray


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
            raise RewardError(f"reward_model.on_error must be one of {', '.join(ON_ERROR)}, got {self.on_error!r}")


class ScoringStopped(RewardError, StepImpossible):
    """A row failed under ``on_error=raise``, or too many rows failed."""


class RewardManager:
    """Scores the rows of a batch with reward functions.

    A row fails if a function raises, returns no finite number or takes too long, or if the response has no token. A row
    with a failed conversation (column ``agent_error``) is masked, counted, and not scored. The manager is a context
    manager: its processes end with the block.

    Args:
        scorer: calls the functions.
        tokenizer: decodes responses, without special tokens.
        policy: treatment of rows without a score.
        shaping: length rewards.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        policy: FailurePolicy | None = None,
        shaping: LengthShaping | None = None,
    ) -> None:
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.policy = policy or FailurePolicy()
        self.shaping = shaping or LengthShaping()

    def __enter__(self) -> Self:
        self.scorer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.scorer.close()

    def score_early(self) -> EarlyScores | None:
        """Start to score samples before their batch is complete; None if the functions cannot."""
        stream = self.scorer.stream()
        return None if stream is None else EarlyScores(stream, self.scorer.stream, self._task_of)

    def score(
        self, batch: BatchT, early: EarlyScores | None = None, names: Sequence[Hashable] | None = None
    ) -> Scored[BatchT]:
        """Score every row, at the last response token; all other entries of the scores are 0.

        Args:
            batch: ``prompts [b, P]``, ``responses [b, R]``, ``attention_mask [b, P+R]``; the columns ``data_source``,
                ``reward_model`` with ``ground_truth``, and optionally ``extra_info``. ``response_mask [b, R]`` defaults
                to all response tokens. Kimi's length reward reads ``uid``.
            early: scores of some of its rows; the result is the same without them.
            names: name of each row in ``early``; None = the row numbers.

        Raises:
            RewardError: a column is missing.
            ScoringStopped: a row failed under ``raise``, or too many rows failed.
        """
        _require_columns(batch)
        samples = _Samples.of(batch)
        outcomes, counts = self._outcomes(samples, early, range(len(samples.responses)) if names is None else names)
        self._apply_policy(samples, outcomes)

        kept = torch.tensor([outcome.failure is None for outcome in outcomes], dtype=torch.bool)
        scores = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        batch = with_scores(batch, scores, kept)

        metrics, extras = collect_extras([outcome.extras for outcome in outcomes])
        metrics |= failure_metrics(outcomes, counts)
        extras["reward_failed"] = (~kept).numpy().astype(object)
        extras["reward_failure"] = object_column([outcome.kind for outcome in outcomes])
        return Scored(batch.with_columns({}, extras), metrics, extras)

    def _outcomes(
        self, samples: _Samples, early: EarlyScores | None, names: Sequence[Hashable]
    ) -> tuple[list[Outcome], RunCounts]:
        outcomes: dict[int, Outcome] = {}
        counts = RunCounts()
        if early is not None:
            present, counts = early.outcomes(names)
            outcomes = {row: present[name] for row, name in enumerate(names) if name in present}
        lengths = samples.lengths
        for row, length in enumerate(lengths):
            if outcome := _unscorable(samples.columns, row, length):
                outcomes[row] = outcome
        rows = [row for row in range(len(lengths)) if row not in outcomes]
        results: list[Outcome] = []
        if rows:
            if early is not None:
                early.settle()
            results, late_counts = self.scorer.score([self._task(samples, row) for row in rows])
            counts = counts.plus(late_counts)
        outcomes |= dict(zip(rows, results, strict=True))
        ordered = [outcomes[row] for row in range(len(lengths))]
        groups = samples.columns.get("uid")
        return self.shaping.apply(ordered, lengths, None if groups is None else groups.tolist()), counts

    def _apply_policy(self, samples: _Samples, outcomes: Sequence[Outcome]) -> None:
        """Stop if the policy requires it; log the number of masked rows otherwise.

        Raises:
            ScoringStopped: a row failed under ``raise``, or too many rows failed.
        """
        failures = [(row, outcome) for row, outcome in enumerate(outcomes) if outcome.failure is not None]
        if not failures:
            return
        first = self._describe(samples, *failures[0])
        for row, outcome in failures:
            if outcome.kind == BAD_SAMPLE and self.policy.on_error == "raise":
                sample = self._describe(samples, row, outcome)
                raise ScoringStopped(f"{sample}\n  (reward_model.on_error=mask masks such rows)")
        if len(failures) == len(outcomes):
            raise ScoringStopped(f"none of {len(outcomes)} rows could be scored; the first: {first}")
        reward_failures = [(row, outcome) for row, outcome in failures if outcome.kind != CONVERSATION]
        if len(reward_failures) > self.policy.max_failure_ratio * len(outcomes):
            kinds = ", ".join(
                f"{sum(outcome.kind == kind for _, outcome in reward_failures)} {name}" for kind, name in _KINDS.items()
            )
            raise ScoringStopped(
                f"{len(reward_failures)} of {len(outcomes)} rows could not be scored ({kinds}), more than "
                f"reward_model.max_failure_ratio={self.policy.max_failure_ratio:g} allows; the first: "
                f"{self._describe(samples, *reward_failures[0])}"
            )
        logger.warning("masked %d of %d rows; the first: %s", len(failures), len(outcomes), first)

    def _task(self, samples: _Samples, row: int) -> RewardTask:
        columns = {name: column[row] for name, column in samples.columns.items()}
        return self._task_of(row, columns, samples.prompts[row].numpy(), samples.responses[row].numpy())

    def _task_of(self, row: Hashable, columns: Mapping[str, Any], prompt: TokenIds, response: TokenIds) -> RewardTask:
        """Build the task of a row from its columns and unpadded token ids."""
        model = columns["reward_model"]
        if not hasattr(model, "get") or model.get("ground_truth") is None:
            raise RewardError(f"column 'reward_model', row {row} is {model!r:.200}; it must have a 'ground_truth'")
        result = columns.get(AGENT_RESULT)
        return RewardTask(
            data_source=columns["data_source"],
            solution_str=self._text(response),
            ground_truth=model["ground_truth"],
            # a copy: the samples of a prompt share it, and functions may modify it
            extra_info=dict(columns.get("extra_info") or {}) | ({} if result is None else {AGENT_RESULT: result}),
            prompt_str=self._text(prompt) if self.scorer.wants_prompt else None,
        )

    def _text(self, ids: TokenIds) -> str:
        return str(self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True))

    def _describe(self, samples: _Samples, row: int, outcome: Outcome) -> str:
        """Describe the sample and the cause, so that the failure can be reproduced by hand."""
        if outcome.kind == CONVERSATION:
            return f"the conversation of row {row} failed: {outcome.failure}"
        parts = {
            "data_source": samples.columns["data_source"][row],
            "prompt": self._text(samples.prompts[row].numpy()),
            "solution_str": self._text(samples.responses[row].numpy()),
            "ground_truth": samples.columns["reward_model"][row]["ground_truth"],
        }
        sample = "\n".join(f"  {name}: {_excerpt(repr(value))}" for name, value in parts.items())
        return f"the reward of row {row} failed: {outcome.failure}\n{sample}"


class EarlyScores:
    """Scores samples while others are still generated, before their batch is complete.

    Args:
        stream: scores the tasks.
        open_stream: opens another one after :meth:`settle`.
        task_of: builds the task of a sample from its name, columns, and token ids of prompt and response.
    """

    def __init__(
        self,
        stream: ScoreStream,
        open_stream: Callable[[], ScoreStream | None],
        task_of: Callable[..., RewardTask],
    ) -> None:
        self._stream: ScoreStream | None = stream
        self._open_stream, self._task_of = open_stream, task_of
        self._tickets: dict[Hashable, range] = {}
        self._settled: dict[Hashable, Outcome] = {}
        self._settled_counts = RunCounts()

    @property
    def names(self) -> set[Hashable]:
        """Samples whose outcomes were not yet returned."""
        return self._tickets.keys() | self._settled.keys()

    def add(self, name: Hashable, columns: Mapping[str, Any], prompt: TokenIds, response: TokenIds) -> None:
        """Score a sample.

        A sample that cannot be scored is left to :meth:`RewardManager.score`, which reports it.

        Args:
            name: unique name, such as its row in the batch to come.
            columns: its non-tensor columns.
            prompt: token ids of the prompt.
            response: token ids of the response.
        """
        with contextlib.suppress(RewardError, KeyError):
            task = self._task_of(name, columns, prompt, response)
            if self._stream is None:
                self._stream = self._open_stream()
            assert self._stream is not None, "the runner had a stream before"
            self._tickets[name] = self._stream.submit(task)

    def outcomes(self, names: Iterable[Hashable]) -> tuple[dict[Hashable, Outcome], RunCounts]:
        """Wait for samples; return their outcomes by name, and the counts since the last call.

        Samples that were not added are left out.

        Raises:
            RewardError: no process for functions can be started.
        """
        names = list(names)
        outcomes = {name: self._settled.pop(name) for name in names if name in self._settled}
        counts, self._settled_counts = self._settled_counts, RunCounts()
        tickets = {name: self._tickets.pop(name) for name in names if name in self._tickets}
        if self._stream is not None:
            outcomes |= dict(zip(tickets, self._stream.outcomes(list(tickets.values())), strict=True))
            counts = counts.plus(self._stream.take_counts())
        return outcomes, counts

    def settle(self) -> None:
        """Wait for all samples, so that the reward processes are free for other batches; keeps the outcomes.

        Raises:
            RewardError: no process for functions can be started.
        """
        if self._stream is None:
            return
        self._stream.finish()
        outcomes, counts = self.outcomes(list(self._tickets))
        self._settled |= outcomes
        self._settled_counts = counts
        self._stream = None

    def cancel(self) -> None:
        """Abandon the samples without a score, and free the reward processes."""
        if self._stream is not None:
            self._stream.cancel()


class NullReward:
    """Reward manager without a reward function, for runs with a reward model only: every score is 0.

    It masks the rows that cannot be scored: failed conversations and responses without a token.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """No process to end."""

    def score_early(self) -> None:
        """Return nothing: there is no reward to score."""
        return

    def score(
        self, batch: BatchT, early: EarlyScores | None = None, names: Sequence[Hashable] | None = None
    ) -> Scored[BatchT]:
        """Return the batch with ``token_level_scores`` of zeros, ``response_mask`` and ``reward_failed``.

        Raises:
            RewardError: no row can be scored.
        """
        kept = torch.tensor(_Samples.of(batch).lengths) > 0
        errors = batch.non_tensor_batch.get("agent_error")
        if errors is not None:
            kept &= torch.tensor([error is None for error in errors], dtype=torch.bool)
        if not kept.any():
            raise RewardError(
                f"none of {len(kept)} rows could be scored: none has a response, or all conversations failed"
            )
        batch = with_scores(batch, torch.zeros(len(kept)), kept)
        extras = {"reward_failed": (~kept).numpy().astype(object)}
        return Scored(batch.with_columns({}, extras), {"reward/failed": float((~kept).sum())}, extras)


_KINDS = {
    BAD_SAMPLE: "raised or returned no number",
    TIMEOUT: "timed out",
    INFRASTRUCTURE: "had an infrastructure failure",
}


def failure_metrics(outcomes: Sequence[Outcome], counts: RunCounts) -> dict[str, float]:
    """Count the rows without a score, by kind of failure."""
    kinds = [outcome.kind for outcome in outcomes]
    return {
        "reward/failed": float(sum(outcome.failure is not None for outcome in outcomes)),
        "reward/bad_samples": float(kinds.count(BAD_SAMPLE)),
        "reward/timeouts": float(kinds.count(TIMEOUT)),
        "reward/infrastructure_failures": float(kinds.count(INFRASTRUCTURE)),
        "reward/retries": float(counts.retries),
        "reward/processes_replaced": float(counts.replaced),
    }


class _Samples(NamedTuple):
    """The samples of a batch: non-tensor columns, and token ids of each row without padding."""

    columns: Mapping[str, np.ndarray]
    prompts: list[Tensor]
    responses: list[Tensor]

    @classmethod
    def of(cls, batch: RewardBatch) -> _Samples:
        ids = (batch.unpadded(name, torch.int32) for name in ("prompts", "responses"))
        return cls(batch.non_tensor_batch, *ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response."""
        return list(map(len, self.responses))


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
    lengths = _Samples.of(batch).lengths
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


def _require_columns(batch: RewardBatch) -> None:
    present = {*batch.tensors, *batch.non_tensor_batch}
    missing = {"prompts", "responses", "attention_mask", "data_source", "reward_model"} - present
    if missing:
        raise RewardError(f"a batch needs {sorted(missing)} to be scored; it has {sorted(present)}")


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT // 2]} ... {text[-_EXCERPT // 2 :]}"
