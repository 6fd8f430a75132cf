"""Preference optimization job, on pairs of responses (DPO, IPO, SLiC, SimPO) or on single responses (KTO)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megarl.algorithms import TokenLoss, kto_kl
from megarl.cluster.role_groups import KTOGroup, MegatronGroup, PreferenceGroup
from megarl.config.batch import PhasePlan
from megarl.config.schema.jobs import PreferenceConfig
from megarl.data import DataProto, LabelledResponses
from megarl.models.sequence_cost import SequenceCost
from megarl.trainer.jobs.pair_training import PairTraining
from megarl.trainer.jobs.supervised import run_supervised
from megarl.trainer.records.reporting import RunSummary
from megarl.trainer.roles.worker_groups import budget
from megarl.workers.kto import class_means, compute_kto_loss
from megarl.workers.preference import compute_preference_loss


def run(config: PreferenceConfig, output_dir: Path) -> RunSummary:
    """Train a policy on preferences; see :func:`~megarl.trainer.jobs.supervised.run_supervised`."""
    return run_supervised(preference_training(config), output_dir)


def preference_training(config: PreferenceConfig) -> PairTraining:
    """Select the job by its loss: on pairs, or on single responses (KTO)."""
    return PreferenceTraining(config) if config.loss.uses_pairs else KTOTraining(config)


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


class KTOTraining(PairTraining):
    """Trains a policy on desirable and undesirable responses (KTO), relative to the initial model."""

    worker = "megarl.workers.kto:KTOWorker"
    rows = "responses"
    dataset_class = LabelledResponses
    config: PreferenceConfig

    def dataset_options(self) -> dict[str, Any]:
        """Return the column of labels, and the column of responses that have one."""
        data = self.config.data
        return {} if data.label_key is None else {"label_key": data.label_key, "answer_keys": (data.response_key,)}

    def worker_arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """Return the micro-batch budget and the loss."""
        return {"budget": budget(phase.micro, cost), "loss": self.config.loss}

    def score(self, workers: MegatronGroup, pairs: DataProto) -> DataProto:
        """Compute the log-ratios of policy to reference, of labelled and of mismatched responses."""
        return cast(KTOGroup, workers).compute_response_log_probs(pairs)

    def pair_loss(self, columns: dict[str, Tensor]) -> TokenLoss:
        """Compute the loss of each response, with one estimate of the KL over all of them."""
        kl = kto_kl(columns["kl_log_ratios"])
        return compute_kto_loss(self.config.loss, columns["log_ratios"], columns["desirable"] > 0, kl)

    def held_out_metrics(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute loss, accuracy, the KL, and with both kinds of responses the margin."""
        result, desirable = self.pair_loss(columns), columns["desirable"] > 0
        counts = int(desirable.sum()), int((~desirable).sum())
        means = class_means(result.diagnostics["reward"], desirable, counts)
        kl = torch.tensor(kto_kl(columns["kl_log_ratios"]), dtype=torch.float64)
        margin = {"margin": means["margin"]} if "margin" in means else {}
        return {"loss": result.loss, "accuracy": result.diagnostics["accuracy"], "kl": kl, **margin}
