"""Supervised jobs: the loop of SFT and reward-model training, through the same workers as reinforcement learning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers import PreTrainedTokenizerBase

from megarl.base.reductions import Metrics
from megarl.cluster.resources import PlacedPool
from megarl.cluster.role_groups import MegatronGroup
from megarl.cluster.worker_group import wait_ready
from megarl.config.batch import PhasePlan, plan_batches, render_plan
from megarl.config.schema.jobs import SupervisedConfig
from megarl.data import PairDataset, SFTDataset, StatefulLoader
from megarl.data.loader import PromptQueue
from megarl.data.tokenizers import load_tokenizer
from megarl.models import read_model_config
from megarl.models.end_tokens import generation_config_with
from megarl.models.sequence_cost import SequenceCost, sequence_cost
from megarl.tracking import SFT_COLUMNS, MetricColumn, read_metrics
from megarl.trainer.jobs.output_folders import check_output_folders
from megarl.trainer.jobs.preflight import check_schedules
from megarl.trainer.jobs.session import open_job
from megarl.trainer.phases.data_loading import mixture_weights, training_files, training_order
from megarl.trainer.records.reporting import RunReporter, RunSummary
from megarl.trainer.records.step_metrics import phase_tokens, rank_balance
from megarl.trainer.records.tracing import RunTracing
from megarl.trainer.roles.worker_groups import Progress, budget, role_settings
from megarl.trainer.state.run_state import RunState, inexact_checkpoints

TARGET_WINDOW = 10
"""Steps over which accuracy is averaged before it is compared with the target."""


class SupervisedJob(ABC):
    """Base class of supervised jobs: data, worker class and validation of one kind of job."""

    worker: ClassVar[str]
    """Worker class, as ``module:class``."""
    value_head: ClassVar[bool] = False
    """Whether the model ends in a scalar head."""
    columns: ClassVar[Sequence[MetricColumn]] = SFT_COLUMNS
    """Columns of the console's table."""
    rows: ClassVar[str] = "samples"
    """Noun for a data row, in the plural."""

    def __init__(self, config: SupervisedConfig) -> None:
        self.config = config

    @property
    def update(self) -> str:
        """Verb that makes one optimizer step from a batch and returns metrics, including ``train/accuracy``."""
        return f"update_{self.config.role}"

    def check(self) -> None:
        """Check mixture and held-out rows, before any process starts.

        Raises:
            ModelError, ConfigError, DataError: names the key, its value, and the remedy.
        """
        mixture_weights(self.config.data)
        _ = self.held_out

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model."""
        return load_tokenizer(str(self.config.model.tokenizer_path))

    @cached_property
    def held_out(self) -> StatefulLoader | None:
        """Held-out rows for validation, in file order; None without validation."""
        return None

    def training_loader(self) -> StatefulLoader:
        """Build the loader of training rows, in batches of ``data.train_batch_size``."""
        data = self.config.data
        dataset = self.dataset(training_files(data))
        return StatefulLoader(dataset, data.train_batch_size, dataset.collate, order=training_order(data, dataset))

    @abstractmethod
    def dataset(self, files: Sequence[str]) -> SFTDataset | PairDataset:
        """Build the dataset of some files."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return read_model_config(self.config.model.path).vocab_size

    def export_files(self, dataset: SFTDataset | PairDataset) -> dict[str, str]:
        """Return the files of an export that differ from the initial folder's: the end of a response as trained."""
        if self.value_head or dataset.end_token is None:
            return {}
        return generation_config_with(Path(self.config.model.path), dataset.end_token)

    @abstractmethod
    def worker_arguments(self, phase: PhasePlan, cost: SequenceCost) -> dict[str, Any]:
        """Return the arguments of the worker besides its settings."""

    def validate(self, workers: MegatronGroup) -> Metrics:
        """Compute the metrics of the held-out rows."""
        return {}

    def is_validation_due(self, state: RunState) -> bool:
        """Return whether :meth:`validate` runs after the finished step."""
        return False


def run_supervised(job: SupervisedJob, output_dir: Path) -> RunSummary:
    """Train, resuming from a checkpoint if there is one, and export a Hugging Face folder.

    Raises:
        MegarlError: an error in configuration, data, model, resources or a worker; all processes are ended.
    """
    job.check()
    with open_job(job.config, output_dir, columns=job.columns) as session:
        config, console = session.config, session.console
        check_output_folders(config, session.resume.path if session.resume else None)
        batches = plan_batches(config)
        loader = job.training_loader()
        rows, files = PromptQueue(loader), job.export_files(cast(SFTDataset | PairDataset, loader.dataset))
        if session.resume is not None:
            rows.load_state_dict(session.resume.state.dataloader)
        total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(rows)
        check_schedules(config, batches, total_steps)
        console.set_total_steps(total_steps)
        console.message("\n".join([render_plan(batches), *inexact_checkpoints(config)]))
        pool = session.start()
        state = session.state(rows, total_steps)
        reporter = session.reporter(state)
        with session.starting_workers() as progress:
            workers = _start_workers(job, batches.phase(config.role), total_steps, pool, progress, files)
        console.message(workers.describe())
        with session.training(state, reporter):
            _fit(job, workers, state, reporter, session.tracing)
            return reporter.close_training(state, config.trainer.hf_export_dir, workers.export_hf)


def _fit(
    job: SupervisedJob, workers: MegatronGroup, state: RunState, reporter: RunReporter, tracing: RunTracing
) -> None:
    """Train until the last step, the target accuracy, or a stop condition."""
    tracing.begin_step(0)
    state.restore([workers])
    target = job.config.trainer.target_accuracy
    past = [row["train/accuracy"] for row in read_metrics(reporter.metrics_file) if "train/accuracy" in row]
    recent = deque(past, TARGET_WINDOW)
    rows = job.config.data.train_batch_size
    for batch in state.remaining_prompts(rows) if not _reached(recent, target) else ():
        tracing.begin_step(state.step)
        with reporter.phase("step"), reporter.phase("update"):
            metrics: Metrics = workers.submit(job.update, batch).result()
        recent.append(metrics["train/accuracy"])
        reached = _reached(recent, target)
        if reached:
            state.end_here()
        tokens = phase_tokens(batch, reporter.seconds)
        if job.is_validation_due(state):
            with reporter.phase("testing"):
                metrics |= job.validate(workers)
        metrics |= state.prompts.metrics() | state.saver.take_metrics()
        reporter.keep_balance(state.step, rank_balance(batch, [workers], {job.update}))
        reporter.log_step(state.step, metrics, tokens)
        if reached:
            reporter.console.message(f"stopped at step {state.step}: trainer.target_accuracy={target} is reached")
        if state.must_save():
            with reporter.phase("save_checkpoint"):
                state.save([workers], reporter.lasting_files)


def _reached(recent: Collection[float], target: float | None) -> bool:
    return target is not None and len(recent) == TARGET_WINDOW and sum(recent) / TARGET_WINDOW >= target


def _start_workers(
    job: SupervisedJob,
    phase: PhasePlan,
    total_steps: int,
    pool: PlacedPool,
    progress: Progress,
    files: Mapping[str, str],
) -> MegatronGroup:
    config, run = job.config, job.config.trainer
    modules = config.model.user_modules
    settings = role_settings(
        run, pool.pool.device, modules, config.model.path, config.megatron, config.optim, total_steps, config.model,
        export_files=files,
    )  # fmt: skip
    cost = sequence_cost(read_model_config(config.model.path), value_head=job.value_head)
    kwargs = {"settings": settings, **job.worker_arguments(phase, cost)}
    budgets = {job.update: budget(phase.micro, cost)}
    workers = MegatronGroup(config.role, job.worker, kwargs, settings.layout, pool, budgets=budgets)
    wait_ready([workers], progress=progress)
    workers.init_model()
    return workers
