"""Scores a batch of responses with a reward function, and lets no failure pass as a reward."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from megarl.errors import RewardError
from megarl.rewards.agent_score import AGENT_RESULT
from megarl.rewards.outcome import Outcome, collect_extras, read_result
from megarl.rewards.registry import RewardFunction, check_signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")
_SHOWN = 2000  # characters of each part of a sample in an error message


class RewardBatch(Protocol):
    """What a batch must offer to be scored; ``megarl.data.DataProto`` does."""

    batch: Any  # mapping of tensors
    non_tensor_batch: dict[str, np.ndarray]

    def with_columns(self, tensors: Mapping[str, Tensor], non_tensors: Mapping[str, Any]) -> Self:
        """The batch with columns added or replaced."""


BatchT = TypeVar("BatchT", bound=RewardBatch)


class Scored(NamedTuple, Generic[BatchT]):
    """A scored batch.

    Attributes:
        batch: the batch with ``token_level_scores``, ``response_mask`` and the extra columns.
        metrics: ``reward/failed`` (rows that could not be scored) and ``reward_extra/<name>/mean``.
        extra_columns: ``reward_failed`` (bool) and ``reward_extra_<name>`` (what the function returned beside the
            score, None where it did not), each an object array ``[b]``.
    """

    batch: BatchT
    metrics: dict[str, float]
    extra_columns: dict[str, np.ndarray]


class Sample(NamedTuple):
    """One response and what it is scored by; ``length`` counts the response's tokens."""

    row: int
    data_source: str
    prompt_ids: list[int]
    solution_str: str
    length: int
    ground_truth: Any
    extra_info: dict[str, Any]


class RewardManager:
    """Runs a reward function over the rows of a batch, one after another.

    A row fails if the function raises, if it returns no finite number, or if the row has no response token that could
    carry the score. A row whose conversation failed (column ``agent_error``) is masked and counted, and not scored.

    Args:
        fn: reward function with verl's signature (see ``megarl.rewards.registry``).
        tokenizer: decodes responses, without special tokens.
        on_error: ``raise`` stops at the first failed row and shows it; ``mask`` sets its ``response_mask`` to 0, so
            that nothing is learned from it, and counts it.

    Raises:
        RewardError: ``fn`` cannot be called as a reward function, or ``on_error`` is unknown.
    """

    def __init__(self, fn: RewardFunction, tokenizer: PreTrainedTokenizerBase, on_error: str = "raise") -> None:
        if on_error not in ON_ERROR:
            raise RewardError(f"reward_model.on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        check_signature(fn, getattr(fn, "__name__", repr(fn)))
        self.fn = fn
        self.tokenizer = tokenizer
        self.on_error = on_error

    def score(self, batch: BatchT) -> Scored[BatchT]:
        """Score every row; the score stands on the row's last response token, all other entries are 0.

        Args:
            batch: ``prompts [b, P]``, ``responses [b, R]``, ``attention_mask [b, P+R]``; ``data_source``,
                ``reward_model`` with ``ground_truth``, and if there is one ``extra_info``. ``response_mask [b, R]`` is
                made from ``attention_mask`` if it is not there.

        Raises:
            RewardError: a column is missing, a row fails under ``raise``, or all rows fail under ``mask``.
        """
        _require_columns(batch)
        attention = batch.batch["attention_mask"][:, batch.batch["prompts"].shape[1] :]
        outcomes = [_lost(batch, row) or self._outcome(self._sample(batch, row)) for row in range(len(attention))]
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if outcomes and len(failures) == len(outcomes):
            raise RewardError(f"none of {len(outcomes)} rows could be scored; the first: {failures[0]}")
        if failures:
            logger.warning("masked %d of %d rows; the first: %s", len(failures), len(outcomes), failures[0])

        kept = torch.tensor([outcome.failure is None for outcome in outcomes], dtype=torch.bool)
        scores = torch.zeros(attention.shape, dtype=torch.float32)
        last = attention.sum(-1)[kept] - 1
        scores[kept, last] = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)[kept]
        mask = batch.batch["response_mask"] if "response_mask" in set(batch.batch.keys()) else attention
        tensors = {"token_level_scores": scores, "response_mask": mask * kept[:, None].to(mask.dtype)}

        metrics, extras = collect_extras([outcome.extras for outcome in outcomes])
        metrics["reward/failed"] = float(len(failures))
        extras["reward_failed"] = (~kept).numpy().astype(object)
        return Scored(batch.with_columns(tensors, extras), metrics, extras)

    def _sample(self, batch: RewardBatch, row: int) -> Sample:
        tensors, others = batch.batch, batch.non_tensor_batch
        prompt, response, mask = (tensors[name][row] for name in ("prompts", "responses", "attention_mask"))
        real = mask.bool()
        response_ids = response[real[len(prompt) :]].tolist()
        model = others["reward_model"][row]
        if not hasattr(model, "get") or model.get("ground_truth") is None:
            raise RewardError(f"column 'reward_model', row {row} is {model!r:.200}; it must have a 'ground_truth'")
        info = others["extra_info"][row] if "extra_info" in others else None
        return Sample(
            row=row,
            data_source=others["data_source"][row],
            prompt_ids=prompt[real[: len(prompt)]].tolist(),
            solution_str=self.tokenizer.decode(response_ids, skip_special_tokens=True),
            length=len(response_ids),
            ground_truth=model["ground_truth"],
            # a copy: the samples of a prompt share it, and functions may write into it
            extra_info=dict(info or {}) | _told_by_agent(others, row),
        )

    def _outcome(self, sample: Sample) -> Outcome:
        """Score one sample; under ``raise`` a failure leaves here as a RewardError."""
        try:
            if sample.length == 0:
                raise RewardError("the response has no token, so nothing could carry a score")
            result = self.fn(
                data_source=sample.data_source,
                solution_str=sample.solution_str,
                ground_truth=sample.ground_truth,
                extra_info=sample.extra_info,
            )
            return read_result(result)
        except (Exception, SystemExit) as error:  # a function that calls exit() must not end the run in silence
            shown = self._describe(sample, error)
            if self.on_error == "raise":
                raise RewardError(f"{shown}\n  (reward_model.on_error=mask leaves such rows out)") from error
            return Outcome(0.0, {}, shown)

    def _describe(self, sample: Sample, error: BaseException) -> str:
        """The sample and the cause, so that the failure can be repeated by hand."""
        cause = str(error)
        if not isinstance(error, RewardError):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            cause = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        parts = {
            "data_source": sample.data_source,
            "prompt": self.tokenizer.decode(sample.prompt_ids, skip_special_tokens=True),
            "solution_str": sample.solution_str,
            "ground_truth": sample.ground_truth,
        }
        shown = "\n".join(f"  {name}: {_short(repr(value))}" for name, value in parts.items())
        return f"the reward of row {sample.row} failed: {cause}\n{shown}"


def _lost(batch: RewardBatch, row: int) -> Outcome | None:
    """The outcome of a row whose conversation failed, before anything could be scored; None: it did not."""
    errors = batch.non_tensor_batch.get("agent_error")
    if errors is None or errors[row] is None:
        return None
    return Outcome(0.0, {}, f"the conversation of row {row} failed: {errors[row]}")


def _told_by_agent(columns: Mapping[str, np.ndarray], row: int) -> dict[str, Any]:
    """What the agent that led the row's conversation returned."""
    told = columns.get(AGENT_RESULT)
    return {} if told is None or told[row] is None else {AGENT_RESULT: told[row]}


def _require_columns(batch: RewardBatch) -> None:
    present = {*(() if batch.batch is None else batch.batch.keys()), *batch.non_tensor_batch}
    missing = {"prompts", "responses", "attention_mask", "data_source", "reward_model"} - present
    if missing:
        raise RewardError(f"a batch needs {sorted(missing)} to be scored; it has {sorted(present)}")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
