"""Base of the jobs on preference pairs: data, validation and metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from megarl.algorithms import TokenLoss
from megarl.base.reductions import Metrics
from megarl.cluster.role_groups import MegatronGroup
from megarl.config.schema.jobs import PairTrainingConfig
from megarl.data import DataProto, PairDataset, StatefulLoader
from megarl.tracking import PAIR_COLUMNS
from megarl.trainer.jobs.supervised import SupervisedJob
from megarl.trainer.phases.data_loading import subset_options
from megarl.trainer.state.run_state import RunState


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
