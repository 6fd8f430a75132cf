"""Supervised fine-tuning, through the same workers as reinforcement learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megarl.cluster import PlacedPool, WorkerGroup, wait_ready
from megarl.config.batch import BatchPlan, plan_batches, render_plan
from megarl.config.sft_schema import SFTConfig
from megarl.data import DataProto, SFTDataset, StatefulLoader
from megarl.models import read_model_config
from megarl.models.sequence_cost import sequence_cost
from megarl.tracking import SFT_COLUMNS, Console
from megarl.trainer.metrics import Metrics, phase_tokens
from megarl.trainer.preflight import check_schedules, check_sft
from megarl.trainer.reporting import RunReporter, RunSummary
from megarl.trainer.roles import update_plan
from megarl.trainer.session import load_tokenizer, placed_devices
from megarl.workers.layouts import layout_of
from megarl.workers.settings import RoleSettings

# Accuracy over this many steps decides whether the target is reached: one step's is noise.
TARGET_WINDOW = 10


def run(config: SFTConfig, output_dir: Path) -> RunSummary:
    """Fine-tune as the configuration says, and write the model as a Hugging Face folder.

    Args:
        config: complete, as ``megarl.config.build`` returns it.
        output_dir: folder of the run's files, which exists.

    Raises:
        MegarlError: something is wrong with configuration, data, model, resources or a worker; processes are gone.
    """
    check_sft(config)
    batches = plan_batches(config)
    loader = _loader(config)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    check_schedules(config, batches, total_steps)
    with Console(total_steps, SFT_COLUMNS) as console:
        console.message(render_plan(batches))
        reporter = RunReporter(config.trainer, dataclasses.asdict(config), output_dir, console)
        with placed_devices(config.trainer) as pool:
            with console.phase("start workers", announce=True):
                workers = _start_workers(config, batches, total_steps, pool)
            console.message(workers.describe())
            _fit(config, workers, loader, total_steps, reporter)
            folder = str(config.trainer.hf_export_dir)
            with console.phase("export", announce=True):
                workers.export_hf(folder)
        return reporter.finish(folder)


def _fit(
    config: SFTConfig, workers: WorkerGroup, loader: StatefulLoader, total_steps: int, reporter: RunReporter
) -> None:
    """Steps until the last one, or until the accuracy reaches its target."""
    recent: list[float] = []
    for step, batch in enumerate(_batches(loader, total_steps), start=1):
        with reporter.phase("step"), reporter.phase("update"):
            metrics: Metrics = workers.update_sft(batch)
        reporter.log_step(step, metrics, phase_tokens(batch, reporter.seconds))
        recent = [*recent[-TARGET_WINDOW + 1 :], metrics["train/accuracy"]]
        target = config.trainer.target_accuracy
        if target is not None and len(recent) == TARGET_WINDOW and sum(recent) / TARGET_WINDOW >= target:
            reporter.console.message(f"stopped at step {step}: trainer.target_accuracy={target} is reached")
            return


def _batches(loader: StatefulLoader, total_steps: int) -> Iterator[DataProto]:
    done = 0
    while done < total_steps:
        for batch in loader:
            yield batch
            done += 1
            if done == total_steps:
                return


def _loader(config: SFTConfig) -> StatefulLoader:
    data = config.data
    dataset = SFTDataset(
        data.train_files,
        load_tokenizer(str(config.model.tokenizer_path)),
        data.max_length,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        truncation=data.truncation,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    return StatefulLoader(dataset, data.train_batch_size, dataset.collate, seed=data.seed or 0, shuffle=data.shuffle)


def _start_workers(config: SFTConfig, batches: BatchPlan, total_steps: int, pool: PlacedPool) -> WorkerGroup:
    settings = RoleSettings(
        model_path=config.model.path,
        layout=layout_of(config.megatron),
        megatron=config.megatron,
        optim=config.optim,
        total_updates=total_steps,
        device=config.trainer.device,
        seed=config.trainer.seed,
    )
    cost = sequence_cost(read_model_config(config.model.path))
    plan = update_plan(batches.phase("sft"), cost, "token-mean", config.data.max_length)
    kwargs, budgets = {"settings": settings, "plan": plan}, {"update_sft": plan.budget}
    workers = WorkerGroup("sft", "megarl.workers.sft:SFTWorker", kwargs, settings.layout, pool, budgets=budgets)
    wait_ready([workers])
    workers.init_model()
    return workers
