"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.batch import PhasePlan
from megarl.config.sft_schema import SFTConfig
from megarl.data import SFTDataset
from megarl.models.sequence_cost import SequenceCost
from megarl.trainer.budgets import update_plan
from megarl.trainer.preflight import check_training_rows
from megarl.trainer.prompts import kept_rows
from megarl.trainer.reporting import RunSummary
from megarl.trainer.supervised import run_supervised
from megarl.trainer.supervised_job import SupervisedJob


def run(config: SFTConfig, output_dir: Path) -> RunSummary | None:
    """Fine-tune as the configuration says; see :func:`~megarl.trainer.supervised.run_supervised`."""
    return run_supervised(FineTuning(config), output_dir)


class FineTuning(SupervisedJob):
    """Learns given responses."""

    worker = "megarl.workers.sft:SFTWorker"
    config: SFTConfig

    def check_data(self) -> None:
        """Refuses files without prompts and responses."""
        data = self.config.data
        check_training_rows(data, (), (data.response_key,), data.prompt_key)

    def dataset(self, files: Sequence[str]) -> SFTDataset:
        """The rows of some files."""
        data = self.config.data
        return SFTDataset(
            files,
            self.tokenizer,
            data.max_length,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
            truncation=data.truncation,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            system_prompt=data.system_prompt,
            workers=data.filter_overlong_prompts_workers,
            cache_dir=data.cache_dir,
            **kept_rows(data),
        )

    def arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """The worker's plan of an optimizer step."""
        return {"plan": update_plan(phase, cost, "token-mean", self.config.data.max_length)}
