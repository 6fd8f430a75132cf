"""The supervised jobs: fine-tuning (SFT), reward models, and preferences on pairs (DPO, IPO, SLiC, SimPO) or KTO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from megarl.algorithms import TokenLoss, bradley_terry_loss, kto_kl
from megarl.base.reductions import Metrics
from megarl.cluster.role_groups import KTOGroup, MegatronGroup, PreferenceGroup, RewardTrainingGroup
from megarl.config.batch import PhasePlan
from megarl.config.schema.jobs import (
    PairTrainingConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
    SupervisedConfig,
)
from megarl.data import DataProto, LabelledResponses, PairDataset, SFTDataset, StatefulLoader
from megarl.models.sequence_cost import SequenceCost
from megarl.tracking import PAIR_COLUMNS
from megarl.trainer.jobs.supervised import SupervisedJob, run_supervised
from megarl.trainer.phases.data_loading import subset_options
from megarl.trainer.records.reporting import RunSummary
from megarl.trainer.roles.worker_groups import budget, update_plan
from megarl.trainer.state.run_state import RunState
from megarl.workers.kto import class_means, compute_kto_loss
from megarl.workers.preference import compute_preference_loss


def run(config: SupervisedConfig, output_dir: Path) -> RunSummary:
    """Run a supervised job; see :func:`~megarl.trainer.jobs.supervised.run_supervised`."""
    return run_supervised(supervised_job(config), output_dir)


def supervised_job(config: SupervisedConfig) -> SupervisedJob:
    """Select the kind of job by its configuration, and for preferences by the loss."""
    if isinstance(config, SFTConfig):
        return FineTuning(config)
    if isinstance(config, PreferenceConfig):
        return PreferenceTraining(config) if config.loss.uses_pairs else KTOTraining(config)
    assert isinstance(config, RewardTrainingConfig)
    return RewardTraining(config)


class FineTuning(SupervisedJob):
    """Trains on the responses of a dataset."""

    worker = "megarl.workers.supervised:SFTWorker"
    config: SFTConfig

    def dataset(self, files: Sequence[str]) -> SFTDataset:
        """Build the dataset of some files."""
        data = self.config.data
        return SFTDataset(
            files,
            self.tokenizer,
            data.max_length,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
            messages_key=data.messages_key,
            truncation=data.truncation,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt,
            workers=data.filter_overlong_prompts_workers,
            cache_dir=data.cache_dir,
            vocab_size=self.vocab_size,
            **subset_options(data),
        )

    def worker_arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """Return the worker's plan of an optimizer step."""
        return {"plan": update_plan(phase, cost, "token-mean", self.config.data.max_length)}


class PairTraining(SupervisedJob):
    """Trains on pairs of a chosen and a rejected response, and validates on held-out pairs."""

    columns = PAIR_COLUMNS
    rows = "pairs"
    dataset_class: ClassVar[type[PairDataset]] = PairDataset
    config: PairTrainingConfig

    @cached_property
    def held_out(self) -> StatefulLoader | None:
        """Held-out pairs for validation, in file order; None without validation."""
        if self.config.trainer.test_freq < 1:
            return None
        data, pairs = self.config.data, self._pairs(self.config.data.val_files)
        return StatefulLoader(pairs, data.train_batch_size, pairs.collate, seed=0, shuffle=False, drop_last=False)

    def dataset(self, files: Sequence[str]) -> PairDataset:
        """Build the dataset of pairs, limited by ``data.train_max_samples``."""
        return self._pairs(files, **subset_options(self.config.data))

    def dataset_options(self) -> dict[str, Any]:
        """Return further arguments of the dataset."""
        return {}

    @abstractmethod
    def score(self, workers: MegatronGroup, pairs: DataProto) -> DataProto:
        """Compute the columns that the loss of pairs reads, ``[b]`` each."""

    @abstractmethod
    def pair_loss(self, columns: dict[str, Tensor]) -> TokenLoss:
        """Compute the loss of each pair from the columns of :meth:`score` and of the batch."""

    def is_validation_due(self, state: RunState) -> bool:
        """Return whether :meth:`validate` runs after the finished step."""
        return state.due(self.config.trainer.test_freq)

    def validate(self, workers: MegatronGroup) -> Metrics:
        """Compute ``val/loss``, ``val/accuracy`` and ``val/margin``: means over all held-out pairs."""
        assert self.held_out is not None, "validation is due only with held-out pairs"
        parts: list[dict[str, Tensor]] = []
        multiple = workers.layout.dp * workers.budgets[self.update].multiple
        for batch in self.held_out:
            padded, added = batch.pad_to_divisor(multiple)
            scores = self.score(workers, padded).unpad(added).tensors
            margins = batch.tensors.get("margins", torch.zeros(len(batch)))
            parts.append({"margins": margins, **{name: scores[name] for name in scores}})
        columns = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
        return {f"val/{name}": values.mean().item() for name, values in self.held_out_metrics(columns).items()}

    def held_out_metrics(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the metrics of a validation, ``[b]`` or means, from the columns of all held-out rows."""
        result = self.pair_loss(columns)
        return {"loss": result.loss, **{name: result.diagnostics[name] for name in ("accuracy", "margin")}}

    def _pairs(self, files: Sequence[str], **sample: Any) -> PairDataset:
        data = self.config.data
        return self.dataset_class(
            files,
            self.tokenizer,
            data.max_length,
            prompt_key=None if data.conversations else data.prompt_key,
            truncation=data.truncation,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt,
            cache_dir=data.cache_dir,
            vocab_size=self.vocab_size,
            **{"answer_keys": (data.chosen_key, data.rejected_key), **self.dataset_options()},
            **sample,
        )


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


class KTOTraining(PreferenceTraining):
    """Trains a policy on desirable and undesirable responses (KTO), relative to the initial model."""

    worker = "megarl.workers.kto:KTOWorker"
    rows = "responses"
    dataset_class = LabelledResponses

    def dataset_options(self) -> dict[str, Any]:
        """Return the column of labels, and the column of responses that have one."""
        data = self.config.data
        return {} if data.label_key is None else {"label_key": data.label_key, "answer_keys": (data.response_key,)}

    def score(self, workers: MegatronGroup, pairs: DataProto) -> DataProto:
        """Compute the log-ratios between policy and reference, for labelled and mismatched responses."""
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
