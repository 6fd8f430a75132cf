"""Preference optimization job (DPO, IPO, SLiC, SimPO), on pairs of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor

from megarl.algorithms import TokenLoss
from megarl.cluster.role_groups import MegatronGroup, PreferenceGroup
from megarl.config.batch import PhasePlan
from megarl.config.schema.jobs import PreferenceConfig
from megarl.data import DataProto
from megarl.models.sequence_cost import SequenceCost
from megarl.trainer.jobs.pair_training import PairTraining
from megarl.trainer.jobs.supervised import run_supervised
from megarl.trainer.jobs.worker_groups import budget
from megarl.trainer.records.reporting import RunSummary
from megarl.workers.preference import compute_preference_loss


def run(config: PreferenceConfig, output_dir: Path) -> RunSummary:
    """Train a policy on pairs of responses; see :func:`~megarl.trainer.jobs.supervised.run_supervised`."""
    return run_supervised(PreferenceTraining(config), output_dir)


class PreferenceTraining(PairTraining):
    """Trains a policy to prefer the chosen response of a pair, relative to the initial model."""

    worker = "megarl.workers.preference:PreferenceWorker"
    config: PreferenceConfig

    def dataset_options(self) -> dict[str, Any]:
        """Return the option to count prompt tokens, which separate prompt and response."""
        return {"with_prompt_tokens": True}

    def worker_arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """Return the micro-batch budget and the loss."""
        return {"budget": budget(phase.micro, cost), "loss": self.config.loss}

    def score(self, workers: MegatronGroup, pairs: DataProto) -> DataProto:
        """Compute the log-probs of both responses by policy and reference."""
        return cast(PreferenceGroup, workers).compute_pair_log_probs(pairs)

    def pair_loss(self, columns: dict[str, Tensor]) -> TokenLoss:
        """Compute the preference loss of each pair."""
        return compute_preference_loss(self.config.loss, columns)
