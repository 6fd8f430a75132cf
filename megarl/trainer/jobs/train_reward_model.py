"""Reward-model training job, on pairs of responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megarl.algorithms import bradley_terry_loss
from megarl.cluster.role_groups import MegatronGroup, RewardTrainingGroup
from megarl.config.batch import PhasePlan
from megarl.config.schema.jobs import RewardTrainingConfig
from megarl.data import PairDataset, StatefulLoader
from megarl.models.sequence_cost import SequenceCost
from megarl.tracking import PAIR_COLUMNS
from megarl.trainer.jobs.supervised import SupervisedJob, run_supervised
from megarl.trainer.jobs.worker_groups import budget
from megarl.trainer.phases.data_loading import subset_options
from megarl.trainer.records.metrics import Metrics
from megarl.trainer.records.reporting import RunSummary
from megarl.trainer.state.run_state import RunState


def run(config: RewardTrainingConfig, output_dir: Path) -> RunSummary:
    """Train a reward model on pairs of responses; see :func:`~megarl.trainer.jobs.supervised.run_supervised`."""
    return run_supervised(RewardTraining(config), output_dir)


class RewardTraining(SupervisedJob):
    """Trains a scalar head to give the chosen response of a pair the larger reward (Bradley-Terry)."""

    worker = "megarl.workers.reward_model:RewardTrainingWorker"
    value_head = True
    columns = PAIR_COLUMNS
    rows = "pairs"
    config: RewardTrainingConfig

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

    def _pairs(self, files: Sequence[str], **sample: Any) -> PairDataset:
        data = self.config.data
        return PairDataset(
            files,
            self.tokenizer,
            data.max_length,
            prompt_key=None if data.conversations else data.prompt_key,
            answer_keys=(data.chosen_key, data.rejected_key),
            margin_key=data.margin_key,
            truncation=data.truncation,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt,
            cache_dir=data.cache_dir,
            **sample,
        )

    def worker_arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """Return the micro-batch budget, the loss coefficient and the padding token."""
        pad, loss = self.tokenizer.pad_token_id, self.config.loss
        coefficient = loss.center_rewards_coefficient
        return {"budget": budget(phase.micro, cost), "center_coefficient": coefficient, "pad_token_id": pad}

    def is_validation_due(self, state: RunState) -> bool:
        """Whether :meth:`validate` runs after the finished step."""
        return state.due(self.config.trainer.test_freq)

    def validate(self, workers: MegatronGroup) -> Metrics:
        """Compute ``val/loss``, ``val/accuracy`` and ``val/margin``: means over all held-out pairs."""
        assert self.held_out is not None, "validation is due only with held-out pairs"
        pairs: list[dict[str, Tensor]] = []
        multiple = workers.layout.dp * workers.budgets[self.update].multiple
        for batch in self.held_out:
            padded, added = batch.pad_to_divisor(multiple)
            rewards = cast(RewardTrainingGroup, workers).score_pairs(padded).unpad(added).tensors
            margins = batch.tensors.get("margins", torch.zeros(len(batch)))
            pairs.append({"margins": margins, **{name: rewards[name] for name in rewards}})
        columns = {name: torch.cat([part[name] for part in pairs]).double() for name in pairs[0]}
        result = bradley_terry_loss(
            columns["chosen_rewards"],
            columns["rejected_rewards"],
            columns["margins"],
            self.config.loss.center_rewards_coefficient,
        )
        metrics = {"loss": result.loss, **{name: result.diagnostics[name] for name in ("accuracy", "margin")}}
        return {f"val/{name}": values.mean().item() for name, values in metrics.items()}
