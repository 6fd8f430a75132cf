"""The reward of a batch: a function's score, a reward model's, or the weighted sum of both."""

from __future__ import annotations

import logging
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megarl.config.rewards import RewardModelConfig
from megarl.config.schema import ScoredConfig
from megarl.data import DataProto
from megarl.errors import RewardError
from megarl.logs import ProcessLogs
from megarl.rewards.manager import Scored
from megarl.rewards.no_function import NoFunction
from megarl.trainer.metrics import summary
from megarl.trainer.reward_functions import function_manager
from megarl.trainer.reward_model import ModelScores, RewardModelScorer

logger = logging.getLogger(__name__)

RM_SCORE, FUNCTION_SCORE = "rm_score", "function_score"
EXTRA = "reward_extra_"
"""Begins the columns of what goes into dumps and validation beside the score."""


class ScoresBatches(Protocol):
    """A reward manager, or what stands in its place."""

    def score(self, batch: DataProto) -> Scored[DataProto]:
        """The batch with its scores; rows that could not be scored are masked."""

    def __enter__(self) -> Self:
        """Starts the processes that it needs."""

    def __exit__(self, *_: object) -> None:
        """Ends them."""


def reward_manager(
    config: ScoredConfig, tokenizer: PreTrainedTokenizerBase, logs: ProcessLogs | None = None
) -> ScoresBatches:
    """What runs the reward function that the configuration names, or stands where none scores.

    Raises:
        RewardError: the function cannot be imported, or cannot be called as a reward function.
    """
    if config.reward_model.function_weight == 0:
        return NoFunction()
    return function_manager(config, tokenizer, logs)


class RewardPhase:
    """Scores batches of answers, in training and validation alike.

    ``score = function_weight * function's score + model_weight * reward model's score``, on a row's last response
    token; what a function's manager gives to other tokens stays there, weighted. A row that the function could not
    score stays masked, whatever the model says of it.

    Args:
        functions: runs the reward function.
        tokenizer: of the policy.
        keys: the ``reward_model`` section.
        model: the reward model, if there is one.
    """

    def __init__(
        self,
        functions: ScoresBatches,
        tokenizer: PreTrainedTokenizerBase,
        keys: RewardModelConfig,
        model: RewardModelScorer | None = None,
    ) -> None:
        self.functions = functions
        self.tokenizer = tokenizer
        self.keys = keys
        self.model = model

    def __enter__(self) -> Self:
        self.functions.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.functions.__exit__()

    def score(self, batch: DataProto) -> Scored[DataProto]:
        """The batch with ``token_level_scores``, ``response_mask`` and extra columns; see :class:`Scored`.

        With a reward model also the columns ``reward_extra_rm_score`` and, where a function scores too,
        ``reward_extra_function_score``, and metrics of both over the rows that count.

        Raises:
            RewardError: as the reward manager; or the reward model's score of a row is not finite.
        """
        scored = self.functions.score(batch)
        return scored if self.model is None else self._combined(scored, self.model.score(scored.batch))

    def _combined(self, scored: Scored[DataProto], told: ModelScores) -> Scored[DataProto]:
        failed = torch.tensor(scored.extra_columns["reward_failed"].astype(bool))
        bad = ~failed & ~told.scores.isfinite()
        if bad.any():
            failed = self._without(bad, failed, told.scores)
        tensors, weight = scored.batch.tensors, self.keys.function_weight or 0.0
        functions = tensors["token_level_scores"].masked_fill(failed[:, None], 0.0)
        total, kept = weight * functions, ~failed
        last = tensors["attention_mask"][:, -total.shape[1] :].sum(-1)[kept] - 1
        total[kept, last] += self.keys.model_weight * told.scores[kept]
        columns = {"token_level_scores": total}
        columns["response_mask"] = tensors["response_mask"] * kept[:, None].to(tensors["response_mask"].dtype)
        parts = {RM_SCORE: told.scores} | ({FUNCTION_SCORE: functions.sum(-1)} if weight else {})
        extras = {f"{EXTRA}{name}": _shown(values, kept) for name, values in parts.items()}
        extras["reward_failed"] = failed.numpy().astype(object)
        metrics = {"reward/failed": float(failed.sum()), "reward/rm_truncated": float(told.truncated)}
        for name, values in parts.items():
            metrics |= summary(f"reward/{name}", values[kept])
        batch = scored.batch.with_columns(columns, extras)
        return Scored(batch, scored.metrics | metrics, scored.extra_columns | extras)

    def _without(self, bad: Tensor, failed: Tensor, scores: Tensor) -> Tensor:
        """The failed rows with those whose score is not finite, where the configuration lets them be masked."""
        row = int(bad.nonzero()[0])
        text = f"the reward model's score of row {row} is {scores[row].item()} ({int(bad.sum())} rows are not finite)"
        if self.keys.on_error == "raise":
            raise RewardError(f"{text}; reward_model.on_error=mask leaves such rows out")
        if (failed | bad).all():
            raise RewardError(f"none of {len(bad)} rows could be scored: {text}")
        logger.warning("masked: %s", text)
        return failed | bad


def _shown(values: Tensor, kept: Tensor) -> np.ndarray:
    """Numbers as a column ``[b]`` of objects, None where a row failed."""
    column = np.empty(len(values), dtype=object)
    column[:] = [value if keep else None for value, keep in zip(values.tolist(), kept.tolist(), strict=True)]
    return column
