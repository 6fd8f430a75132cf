"""One reinforcement-learning run, from its configuration to its summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megarl.cluster import PlacedPool
from megarl.config.batch import plan_batches, render_plan
from megarl.config.schema import TrainConfig
from megarl.data.prompt_queue import PromptQueue
from megarl.models.eos import all_eos_token_ids
from megarl.rollout.endpoint import build_endpoint
from megarl.tracing import PHASE, span
from megarl.tracking import Console
from megarl.trainer.advantage import AdvantagePhase
from megarl.trainer.correction import CorrectionPhase
from megarl.trainer.dry_run.rehearsal import dry_run
from megarl.trainer.dry_run.train import TrainRehearsal
from megarl.trainer.ppo_trainer import PPOTrainer
from megarl.trainer.preflight import check_schedules, check_train
from megarl.trainer.profiling import role_profiles
from megarl.trainer.prompts import prompt_loader, validation_loader
from megarl.trainer.reporting import RunReporter, RunSummary
from megarl.trainer.reward_model import SequenceReader, reward_model_scorer
from megarl.trainer.reward_phase import RewardPhase, reward_manager
from megarl.trainer.roles import RoleBuilder
from megarl.trainer.rollout import RolloutPhase
from megarl.trainer.run_state import RunState, find_resume, inexact_checkpoints
from megarl.trainer.session import load_tokenizer, placed_devices, run_logs
from megarl.trainer.shaping import RewardShaping
from megarl.trainer.stopping import Stop, ends_on_sigterm, own_deadlines
from megarl.trainer.tracing import RunTracing
from megarl.trainer.validation import Validator


def run(config: TrainConfig, output_dir: Path) -> RunSummary | None:
    """Train as the configuration says; with ``trainer.dry_run`` only go through what comes before, and return None.

    Args:
        config: complete, as ``megarl.config.build`` returns it.
        output_dir: folder of the run's files, which exists.

    Raises:
        MegarlError: something is wrong with configuration, data, model, resources or a worker; processes are gone.
    """
    if config.trainer.dry_run:
        dry_run(TrainRehearsal(config))
        return None
    check_train(config)
    with Console(quiet=config.trainer.quiet, title=config.trainer.experiment_name) as console:
        builder = TrainerBuilder(config, output_dir, console)
        console.message("\n".join([render_plan(builder.batches), *inexact_checkpoints(config)]))
        with (
            builder.endpoint or nullcontext(),
            builder.rewards,
            placed_devices(config.trainer, builder.logs) as pool,
            run_tracing(config, output_dir, console.warn, pool) as tracing,
        ):
            with console.phase("start workers", announce=True), span("start_workers", PHASE):
                trainer = builder.build(pool, tracing)
            with ends_on_sigterm(builder.stop) if config.trainer.save_freq > 0 else nullcontext():
                return trainer.fit()


def run_tracing(config: TrainConfig, folder: Path, message: Callable[[str], None], pool: PlacedPool) -> RunTracing:
    """What is recorded of the run's processes.

    Raises:
        ConfigError: a profiler needs CUDA, and the run is on CPU.
    """
    profiles = role_profiles(config, folder)
    return RunTracing(config.trainer, folder, message, pool, profiles, config.global_profiler)


class TrainerBuilder:
    """Puts a trainer together: all choices between algorithms, layouts and engines are made here.

    The constructor does what needs no worker (tokenizer, data, checkpoint to continue from), so that bad input is
    refused before any process is started.

    Args:
        config: complete.
        output_dir: folder of the run's files.
        console: of the run.
    """

    def __init__(self, config: TrainConfig, output_dir: Path, console: Console) -> None:
        self.config = config
        self.output_dir = output_dir
        self.console = console
        self.logs = run_logs(config.trainer, output_dir)
        self.batches = plan_batches(config)
        self.stop = Stop(own_deadlines(config.trainer.max_wall_seconds), config.trainer.esi_redundant_time)
        self.tokenizer = load_tokenizer(str(config.actor_rollout_ref.model.tokenizer_path))
        self.rewards = RewardPhase(
            reward_manager(config, self.tokenizer, self.logs), self.tokenizer, config.reward_model
        )
        self.reader = SequenceReader(config.reward_model, self.tokenizer) if config.reward_model.enable else None
        self.resume = find_resume(config)
        self.prompts = PromptQueue(prompt_loader(config, self.tokenizer))
        if self.resume is not None:
            self.prompts.load_state_dict(self.resume.state.dataloader)
        self.val_loader = validation_loader(config, self.tokenizer) if config.data.val_files else None
        self.total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(self.prompts)
        check_schedules(config, self.batches, self.total_steps)
        self.endpoint = build_endpoint(config, self.tokenizer)

    def build(self, pool: PlacedPool, tracing: RunTracing) -> PPOTrainer:
        """Start the workers on the pool's devices and return the trainer, which tells ``tracing`` of its steps.

        Raises:
            WorkerError: a worker failed to start.
        """
        config, total_steps = self.config, self.total_steps
        self.console.set_total_steps(total_steps)
        advantage = AdvantagePhase(config.algorithm, all_eos_token_ids(config.actor_rollout_ref.model.path))
        state = RunState(
            config, self.prompts, advantage.kl_controller, total_steps, self.resume, self.stop, self.console.message
        )
        resumed_from = (self.resume.path, self.resume.state.step) if self.resume else None
        reporter = RunReporter(
            config.trainer, dataclasses.asdict(config), self.output_dir, self.console, resumed_from, tracing
        )
        roles = RoleBuilder(config, self.batches, total_steps, pool).build()
        if roles.reward_model and self.reader:
            self.rewards.model = reward_model_scorer(roles.reward_model, self.reader)
        self.console.message(roles.describe())
        if self.endpoint:
            self.console.message(self.endpoint.describe())
        rollout = RolloutPhase(
            roles.replicas(),
            config,
            self.tokenizer,
            self._batch_facts(),
            on_lost=roles.replace_replicas,
            state_masking=config.actor_rollout_ref.actor.state_masking,
            endpoint=self.endpoint,
        )
        validator = None
        if self.val_loader is not None:
            validator = Validator(rollout, self.rewards, self.val_loader, self.tokenizer)
        shaping = RewardShaping(config.algorithm, total_steps, self.tokenizer, config.data.max_response_length)
        correction = CorrectionPhase(config.algorithm.rollout_correction)
        return PPOTrainer(
            config, roles, rollout, self.rewards, shaping, advantage, correction, validator, state, reporter
        )

    def _batch_facts(self) -> dict[str, Any]:
        """What dispatch must know of a training batch: rows per mini-batch of each update, and whether to balance."""
        rows = {
            f"{phase.name}_mini_batch_rows": phase.samples_per_mini_batch
            for phase in self.batches.phases
            if phase.updates
        }
        return {**rows, "balance_batch": self.config.trainer.balance_batch}
