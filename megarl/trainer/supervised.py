"""A job that learns from given answers, through the same workers as reinforcement learning."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path

from megarl.cluster import PlacedPool, WorkerGroup, wait_ready
from megarl.config.batch import PhasePlan, plan_batches, render_plan
from megarl.config.supervised import SupervisedConfig
from megarl.data.prompt_queue import PromptQueue
from megarl.models import read_model_config
from megarl.models.sequence_cost import sequence_cost
from megarl.tracing import PHASE, span
from megarl.tracking import Console, read_metrics
from megarl.trainer.budgets import budget
from megarl.trainer.dry_run.rehearsal import dry_run
from megarl.trainer.dry_run.supervised import SupervisedRehearsal
from megarl.trainer.metrics import Metrics, phase_tokens
from megarl.trainer.preflight import check_schedules
from megarl.trainer.rank_balance import rank_balance
from megarl.trainer.reporting import RunReporter, RunSummary
from megarl.trainer.run_state import RunState, find_resume, inexact_checkpoints
from megarl.trainer.session import placed_devices, run_logs
from megarl.trainer.stopping import Stop, ends_on_sigterm, own_deadlines
from megarl.trainer.supervised_job import SupervisedJob
from megarl.trainer.tracing import RunTracing
from megarl.workers.layouts import layout_of
from megarl.workers.settings import RoleSettings

# Accuracy over this many steps decides whether the target is reached: one step's is noise.
TARGET_WINDOW = 10


def run_supervised(job: SupervisedJob, output_dir: Path) -> RunSummary | None:
    """Train as the job's configuration says, from a checkpoint where there is one, and write a Hugging Face folder.

    With ``trainer.dry_run`` only go through what comes before, and return None.

    Args:
        job: what is learned.
        output_dir: folder of the run's files, which exists.

    Raises:
        MegarlError: something is wrong with configuration, data, model, resources or a worker; processes are gone.
    """
    config = job.config
    if config.trainer.dry_run:
        dry_run(SupervisedRehearsal(job))
        return None
    job.check()
    batches = plan_batches(config)
    stop = Stop(own_deadlines(config.trainer.max_wall_seconds), config.trainer.esi_redundant_time)
    resume = find_resume(config)
    rows = PromptQueue(job.training_loader())
    if resume is not None:
        rows.load_state_dict(resume.state.dataloader)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(rows)
    check_schedules(config, batches, total_steps)
    run = config.trainer
    with Console(total_steps, job.columns, quiet=run.quiet, title=run.experiment_name) as console:
        console.message("\n".join([render_plan(batches), *inexact_checkpoints(config)]))
        state = RunState(config, rows, None, total_steps, resume, stop, console.message)
        resumed_from = (resume.path, resume.state.step) if resume else None
        reporter = RunReporter(config.trainer, dataclasses.asdict(config), output_dir, console, resumed_from)
        with (
            placed_devices(config.trainer, run_logs(config.trainer, output_dir)) as pool,
            RunTracing(config.trainer, output_dir, console.warn, pool) as reporter.tracing,
        ):
            with console.phase("start workers", announce=True), span("start_workers", PHASE):
                workers = _start_workers(job, batches.phase(config.role), total_steps, pool)
            console.message(workers.describe())
            with ends_on_sigterm(stop) if config.trainer.save_freq > 0 else nullcontext():
                _fit(job, workers, state, reporter)
                return _close(config, workers, state, reporter)


def _fit(job: SupervisedJob, workers: WorkerGroup, state: RunState, reporter: RunReporter) -> None:
    """Steps until the last one, until the accuracy reaches its target, or until the run has to end."""
    reporter.begin_step(0)
    state.restore([workers])
    target = job.config.trainer.target_accuracy
    recent = deque(_accuracies(reporter.metrics_file), TARGET_WINDOW)
    rows = job.config.data.train_batch_size
    for batch in state.remaining_prompts(rows) if not _reached(recent, target) else ():
        reporter.begin_step(state.step)
        with reporter.phase("step"), reporter.phase("update"):
            metrics: Metrics = workers.submit(job.update, batch).result()
        state.saver.advance()
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


def _close(config: SupervisedConfig, workers: WorkerGroup, state: RunState, reporter: RunReporter) -> RunSummary:
    """Completes the last save and exports the model, where the run is over."""
    ended_early = state.finish()
    folder = None if ended_early else str(config.trainer.hf_export_dir)
    if ended_early:
        reporter.console.warn(ended_early)
    if folder:
        with reporter.console.phase("export", announce=True):
            workers.export_hf(folder)
    summary = reporter.finish(folder)
    state.check_last_save()
    return summary


def _accuracies(metrics_file: Path) -> list[float]:
    """Those of the steps before a run was continued."""
    return [row["train/accuracy"] for row in read_metrics(metrics_file) if "train/accuracy" in row]


def _reached(recent: Collection[float], target: float | None) -> bool:
    return target is not None and len(recent) == TARGET_WINDOW and sum(recent) / TARGET_WINDOW >= target


def _start_workers(job: SupervisedJob, phase: PhasePlan, total_steps: int, pool: PlacedPool) -> WorkerGroup:
    config = job.config
    settings = RoleSettings(
        model_path=config.model.path,
        layout=layout_of(config.megatron),
        megatron=config.megatron,
        optim=config.optim,
        total_updates=total_steps,
        device=config.trainer.device,
        seed=config.trainer.seed,
        external_lib=config.model.own_modules,
    )
    cost = sequence_cost(read_model_config(config.model.path), value_head=job.value_head)
    kwargs = {"settings": settings, **job.arguments(phase, cost)}
    budgets = {job.update: budget(phase.micro, cost)}
    workers = WorkerGroup(config.role, job.worker, kwargs, settings.layout, pool, budgets=budgets)
    wait_ready([workers])
    workers.init_model()
    return workers
