"""The dry run of a job that learns from given answers."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megarl.data import StatefulLoader
from megarl.trainer.dry_run.rehearsal import Rehearsal
from megarl.trainer.preflight import check_learners
from megarl.trainer.supervised_job import SupervisedJob
from megarl.workers.layouts import layout_of


class SupervisedRehearsal(Rehearsal):
    """Supervised fine-tuning, or the training of a reward model.

    Args:
        job: whose configuration is complete.
    """

    model_key = "model"

    def __init__(self, job: SupervisedJob) -> None:
        super().__init__(job.config)
        self.job = job
        self.rows = job.rows

    def roles(self) -> dict[str, tuple[str, str]]:
        """The one model; its weights need not be there."""
        config = self.job.config
        check_learners(config, weights=False)
        return {config.role: (config.model.path, layout_of(config.megatron).describe())}

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The job's."""
        return self.job.tokenizer

    def training_rows(self) -> StatefulLoader:
        """Rows with their answers."""
        self.job.check_data()
        return self.job.training_loader()

    def held_out_rows(self) -> StatefulLoader | None:
        """Rows with their answers, where the job validates."""
        return self.job.held_out
