"""Training of a reward model on pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import bradley_terry_loss
from megarl.cluster import WorkerGroup
from megarl.config.batch import PhasePlan
from megarl.config.reward_model_schema import RewardTrainingConfig
from megarl.data import PairDataset, StatefulLoader, check_files
from megarl.models.sequence_cost import SequenceCost
from megarl.tracking import PAIR_COLUMNS
from megarl.trainer.budgets import budget
from megarl.trainer.metrics import Metrics
from megarl.trainer.preflight import check_training_rows
from megarl.trainer.prompts import kept_rows
from megarl.trainer.reporting import RunSummary
from megarl.trainer.run_state import RunState
from megarl.trainer.supervised import run_supervised
from megarl.trainer.supervised_job import SupervisedJob


def run(config: RewardTrainingConfig, output_dir: Path) -> RunSummary | None:
    """Train as the configuration says; see :func:`~megarl.trainer.supervised.run_supervised`."""
    return run_supervised(RewardTraining(config), output_dir)


class RewardTraining(SupervisedJob):
    """Learns to give the better of two answers the larger reward."""

    worker = "megarl.workers.reward_model:RewardTrainingWorker"
    value_head = True
    columns = PAIR_COLUMNS
    rows = "pairs"
    config: RewardTrainingConfig

    def check_data(self) -> None:
        """Refuses files without pairs, held-out ones included."""
        data = self.config.data
        prompt = None if data.conversations else data.prompt_key
        margins = [data.margin_key] if data.margin_key else []
        texts = [data.chosen_key, data.rejected_key]
        check_training_rows(data, margins, texts, prompt)
        if data.val_files:
            check_files(data.val_files, margins, "data.val_files", prompt, texts)

    @cached_property
    def held_out(self) -> StatefulLoader | None:
        """Pairs to validate on, in file order; None where nothing is validated."""
        if self.config.trainer.test_freq < 1:
            return None
        data, pairs = self.config.data, self._pairs(self.config.data.val_files)
        return StatefulLoader(pairs, data.train_batch_size, pairs.collate, seed=0, shuffle=False, drop_last=False)

    def dataset(self, files: Sequence[str]) -> PairDataset:
        """The pairs of some files, as many as the configuration keeps."""
        return self._pairs(files, **kept_rows(self.config.data))

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
            system_prompt=data.system_prompt,
            cache_dir=data.cache_dir,
            **sample,
        )

    def arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """How pairs are cut, the loss, and what the model's config names as padding."""
        pad, loss = self.tokenizer.pad_token_id, self.config.loss
        coefficient = loss.center_rewards_coefficient
        return {"budget": budget(phase.micro, cost), "center_coefficient": coefficient, "pad_token_id": pad}

    def is_validation_due(self, state: RunState) -> bool:
        """Whether :meth:`validate` follows the step that is done."""
        return state.due(self.config.trainer.test_freq)

    def validate(self, workers: WorkerGroup) -> Metrics:
        """``val/loss``, ``val/accuracy`` and ``val/margin``: means over all held-out pairs."""
        assert self.held_out is not None, "validation is due only where there is something to validate on"
        pairs: list[dict[str, Tensor]] = []
        multiple = workers.layout.dp * workers.budgets[self.update].multiple
        for batch in self.held_out:
            padded, added = batch.pad_to_divisor(multiple)
            told = workers.score_pairs(padded).unpad(added).tensors
            margins = batch.tensors.get("margins", torch.zeros(len(batch)))
            pairs.append({"margins": margins, **{name: told[name] for name in told}})
        columns = {name: torch.cat([part[name] for part in pairs]).double() for name in pairs[0]}
        result = bradley_terry_loss(
            columns["chosen_rewards"],
            columns["rejected_rewards"],
            columns["margins"],
            self.config.loss.center_rewards_coefficient,
        )
        named = {"loss": result.loss, **{name: result.diagnostics[name] for name in ("accuracy", "margin")}}
        return {f"val/{name}": values.mean().item() for name, values in named.items()}
