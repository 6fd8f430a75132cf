"""What of a batch is learned from, and how much of it, where the engine is not quite the policy that learns."""

from __future__ import annotations

from typing import Protocol

import torch

from megarl.algorithms import Rejection, Truncation, importance_weights, log_ratios, rejected_tokens
from megarl.config.rollout_correction import RolloutCorrectionConfig, rejection_rules, weight_bounds
from megarl.data import DataProto
from megarl.errors import DataError
from megarl.trainer.metrics import Metrics, compared_tokens


class TellsLogProbs(Protocol):
    """The actor, as far as this phase needs it."""

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` of the response tokens."""


class CorrectionPhase:
    """Weighs and rejects tokens by the ratio of the actor's probability to the engine's, over the whole batch.

    It comes after the advantages: a rejected answer's score is as good as any for its group's baseline, and a reward
    that stands on a rejected token belongs to the tokens before it. Only the updates see what was rejected, and count
    it in no mean; scores and lengths are reported of all answers.

    Args:
        config: complete, of ``algorithm.rollout_correction``.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self.bypass = config.bypass_mode
        self.level = config.rollout_is
        self.normalize = config.rollout_is_batch_normalize
        bounds = weight_bounds(config)
        self.truncation = Truncation(bounds.upper, bounds.lower)
        self.rules = [Rejection(rule.option, rule.upper, rule.lower) for rule in rejection_rules(config)]

    def old_log_probs(self, batch: DataProto, actor: TellsLogProbs) -> DataProto:
        """``old_log_probs``, to which PPO's ratio is: by the actor, or as the engine sampled."""
        if not self.bypass:
            return actor.compute_log_prob(batch)
        self._check_finite(batch)
        return DataProto.from_dict({"old_log_probs": batch.tensors["rollout_log_probs"].clone()})

    def apply(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """What the updates learn from: the batch with ``rollout_is_weights`` and less in its ``response_mask``.

        Raises:
            DataError: the engine or the actor gave a log-prob that is not finite.
        """
        if self.level is None and not self.rules:
            return batch
        self._check_finite(batch)
        tensors, compared = batch.tensors, compared_tokens(batch)
        trained = tensors["response_mask"]
        ratios = log_ratios(tensors["old_log_probs"], tensors["rollout_log_probs"], compared)
        columns: dict[str, torch.Tensor] = {}
        statistics: Metrics = {}
        if self.level is not None:
            columns["rollout_is_weights"], statistics = importance_weights(
                ratios,
                compared,
                trained,
                level=self.level,
                truncation=self.truncation,
                normalize=self.normalize,
            )
        if self.rules:
            rejected, told = rejected_tokens(ratios, compared, trained, self.rules)
            columns["response_mask"] = trained.masked_fill(rejected, 0)
            statistics |= told
        metrics |= {f"rollout_corr/{name}": value for name, value in statistics.items()}
        return batch.with_columns(columns, {})

    @staticmethod
    def _check_finite(batch: DataProto) -> None:
        compared = compared_tokens(batch)
        for name in ("rollout_log_probs", "old_log_probs"):
            if name in batch.tensors:
                wrong = (compared & ~torch.isfinite(batch.tensors[name])).nonzero()
                if len(wrong):
                    row, token = wrong[0].tolist()
                    value = batch.tensors[name][row, token].item()
                    raise DataError(
                        f"{name}={value} of row {row}, token {token}: algorithm.rollout_correction needs "
                        "finite log-probs"
                    )
