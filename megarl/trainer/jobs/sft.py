"""Supervised fine-tuning (SFT) job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.batch import PhasePlan
from megarl.config.schema.jobs import SFTConfig
from megarl.data import SFTDataset
from megarl.models.sequence_cost import SequenceCost
from megarl.trainer.jobs.supervised import SupervisedJob, run_supervised
from megarl.trainer.phases.data_loading import subset_options
from megarl.trainer.records.reporting import RunSummary
from megarl.trainer.roles.worker_groups import update_plan


def run(config: SFTConfig, output_dir: Path) -> RunSummary:
    """Fine-tune a model on prompts and responses; see :func:`~megarl.trainer.jobs.supervised.run_supervised`."""
    return run_supervised(FineTuning(config), output_dir)


class FineTuning(SupervisedJob):
    """Trains on the responses of a dataset."""

    worker = "megarl.workers.sft:SFTWorker"
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
