"""Reward-model training job, on pairs of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor

from megarl.algorithms import TokenLoss, bradley_terry_loss
from megarl.cluster.role_groups import MegatronGroup, RewardTrainingGroup
from megarl.config.batch import PhasePlan
from megarl.config.schema.jobs import RewardTrainingConfig
from megarl.data import DataProto
from megarl.models.sequence_cost import SequenceCost
from megarl.trainer.jobs.pair_training import PairTraining
from megarl.trainer.jobs.supervised import run_supervised
from megarl.trainer.records.reporting import RunSummary
from megarl.trainer.roles.worker_groups import budget


def run(config: RewardTrainingConfig, output_dir: Path) -> RunSummary:
    """Train a reward model on pairs of responses; see :func:`~megarl.trainer.jobs.supervised.run_supervised`."""
    return run_supervised(RewardTraining(config), output_dir)


class RewardTraining(PairTraining):
    """Trains a scalar head to give the chosen response of a pair the larger reward (Bradley-Terry)."""

    worker = "megarl.workers.reward_model:RewardTrainingWorker"
    value_head = True
    config: RewardTrainingConfig

    def dataset_options(self) -> dict[str, Any]:
        """Return the column of margins."""
        return {"margin_key": self.config.data.margin_key}

    def worker_arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """Return the micro-batch budget, the loss coefficient and the padding token."""
        pad, loss = self.tokenizer.pad_token_id, self.config.loss
        coefficient = loss.center_rewards_coefficient
        return {"budget": budget(phase.micro, cost), "center_coefficient": coefficient, "pad_token_id": pad}

    def score(self, workers: MegatronGroup, pairs: DataProto) -> DataProto:
        """Compute the rewards of both responses."""
        return cast(RewardTrainingGroup, workers).score_pairs(pairs)

    def pair_loss(self, columns: dict[str, Tensor]) -> TokenLoss:
        """Compute the Bradley-Terry loss of each pair."""
        return bradley_terry_loss(
            columns["chosen_rewards"],
            columns["rejected_rewards"],
            columns["margins"],
            self.config.loss.center_rewards_coefficient,
        )
