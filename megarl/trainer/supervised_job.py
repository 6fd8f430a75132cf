"""What the kinds of jobs that learn from given answers differ in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from megarl.cluster import WorkerGroup
from megarl.config.batch import PhasePlan
from megarl.config.supervised import SupervisedConfig
from megarl.data import PairDataset, SFTDataset, StatefulLoader
from megarl.models.sequence_cost import SequenceCost
from megarl.tracking import SFT_COLUMNS, Column, check_trackers
from megarl.trainer.metrics import Metrics
from megarl.trainer.preflight import check_learners
from megarl.trainer.prompts import training_files, training_order
from megarl.trainer.run_state import RunState
from megarl.trainer.session import load_tokenizer


class SupervisedJob(ABC):
    """What one kind of supervised job is made of.

    Args:
        config: complete, as ``megarl.config.build`` returns it.
    """

    worker: ClassVar[str]
    """Worker class, as ``module:class``."""
    value_head: ClassVar[bool] = False
    """Whether the model ends in a scalar head."""
    columns: ClassVar[Sequence[Column]] = SFT_COLUMNS
    """Of the console's table."""
    rows: ClassVar[str] = "samples"
    """What a row of the data is, in the plural."""

    def __init__(self, config: SupervisedConfig) -> None:
        self.config = config

    @property
    def update(self) -> str:
        """Verb that takes a batch, makes one optimizer step, and tells metrics, ``train/accuracy`` among them."""
        return f"update_{self.config.role}"

    def check(self) -> None:
        """Refuses what is wrong with model and data, held-out rows included, before anything is started.

        Raises:
            ModelError, ConfigError, DataError: names the field, its value, and what would be right.
        """
        check_trackers(self.config.trainer.logger)
        check_learners(self.config)
        self.check_data()
        _ = self.held_out

    @abstractmethod
    def check_data(self) -> None:
        """Refuses files that lack what a row needs.

        Raises:
            DataError: names the key, the file, and what would be right.
        """

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's."""
        return load_tokenizer(str(self.config.model.tokenizer_path))

    @cached_property
    def held_out(self) -> StatefulLoader | None:
        """Rows to validate on, in file order; None where nothing is validated."""
        return None

    def training_loader(self) -> StatefulLoader:
        """Rows to learn from, in batches of ``data.train_batch_size``."""
        data = self.config.data
        dataset = self.dataset(training_files(data))
        return StatefulLoader(dataset, data.train_batch_size, dataset.collate, order=training_order(data, dataset))

    @abstractmethod
    def dataset(self, files: Sequence[str]) -> SFTDataset | PairDataset:
        """The rows of some files."""

    @abstractmethod
    def arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """The worker's arguments besides its settings."""

    def validate(self, workers: WorkerGroup) -> Metrics:
        """Metrics of held-out rows, where that is due."""
        return {}

    def is_validation_due(self, state: RunState) -> bool:
        """Whether :meth:`validate` follows the step that is done."""
        return False
