"""Training job: reinforcement learning from the configuration to the summary of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.agents.endpoint import check_endpoint
from megarl.base.allocators import keep_freed_memory
from megarl.cluster.agent_runners import AgentRunners
from megarl.cluster.calls import completed_call
from megarl.cluster.stored_images import store_images
from megarl.config.batch import plan_batches, render_plan
from megarl.config.schema.jobs import TrainConfig
from megarl.data.loader import PromptQueue
from megarl.data.tokenizers import load_tokenizer
from megarl.samples.reward_functions import runner_scorers, val_reward_config
from megarl.samples.reward_phase import RewardModelScorer, RewardPhase, SequenceReader, reward_manager
from megarl.samples.rollouts import Rollouts
from megarl.samples.service import SampleService, restored_ledger
from megarl.trainer.callbacks import load_callbacks
from megarl.trainer.jobs.output_folders import check_output_folders, claim_response_folders
from megarl.trainer.jobs.preflight import check_schedules, check_train
from megarl.trainer.jobs.session import JobSession, open_job
from megarl.trainer.loop.ppo_trainer import PPOTrainer, StepPhases
from megarl.trainer.loop.recorders import build_recorders
from megarl.trainer.phases.advantage_phase import AdvantagePhase, RewardShaping
from megarl.trainer.phases.correction_phase import (
    PreferencePhase,
    RolloutCorrectionPhase,
    TruncatedResponsesPhase,
)
from megarl.trainer.phases.data_loading import prompt_loader, validation_loader
from megarl.trainer.phases.end_tokens import policy_end_tokens
from megarl.trainer.phases.model_passes import (
    ROW_VERB,
    AlignmentPhase,
    BatchPhase,
    ModelPass,
    TeacherPhase,
    simultaneous_passes,
    verb_pass,
)
from megarl.trainer.phases.prompt_images import longest_with_images
from megarl.trainer.phases.validation import Validator
from megarl.trainer.records.reporting import RunSummary
from megarl.trainer.roles.devices import JobPools
from megarl.trainer.roles.role_builder import RoleBuilder
from megarl.trainer.roles.worker_groups import Progress, Roles
from megarl.trainer.state.run_state import inexact_checkpoints
from megarl.workers.dispatch import UPDATE_ROWS

LARGEST_KEPT_TENSOR = 2**30
"""Bytes of the largest freed tensor whose memory the driver keeps: a column of a large batch."""


def run(config: TrainConfig, output_dir: Path) -> RunSummary:
    """Train with reinforcement learning.

    Raises:
        MegarlError: an error in configuration, data, model, resources or a worker; all processes are ended.
    """
    check_train(config)
    keep_freed_memory(LARGEST_KEPT_TENSOR)
    with open_job(config, output_dir) as session:
        check_output_folders(config, session.resume.path if session.resume else None)
        with session.console.phase("read data", announce=True):
            builder = TrainerBuilder(session)
        session.console.message("\n".join([render_plan(builder.batches), *inexact_checkpoints(config)]))
        session.start(builder.reward_functions, builder.val_functions)
        with session.starting_workers() as progress:
            trainer = builder.build(session.pools, progress)
        with session.training(trainer.state, trainer.reporter):
            claim_response_folders(config, session.run_id)
            return trainer.fit()


class TrainerBuilder:
    """Builds the trainer, and selects its phases, roles and engines from the configuration.

    The constructor does everything that needs no worker (tokenizer, data, callbacks), so that invalid input fails
    before any process starts.
    """

    def __init__(self, session: JobSession[TrainConfig]) -> None:
        self.session = session
        config = session.config
        self.batches = plan_batches(config)
        self.tokenizer = load_tokenizer(str(config.actor_rollout_ref.model.tokenizer_path))
        self.end_tokens = policy_end_tokens(config.actor_rollout_ref.model.path, self.tokenizer, session.console.warn)
        self.reward_functions = reward_manager(config, self.tokenizer, session.logs)
        scoring = val_reward_config(config)
        self.val_functions = None if scoring is None else reward_manager(scoring, self.tokenizer, session.logs)
        scores, longest = config.reward.model, longest_with_images(config)
        self.reader = SequenceReader(scores, self.tokenizer, longest) if scores.enable else None
        self.callbacks = load_callbacks(config.trainer.callbacks)
        self.prompts = PromptQueue(prompt_loader(config, self.tokenizer))
        step, rollout = 0, {}
        if session.resume is not None:
            state = session.resume.state
            step, rollout = state.step, state.rollout
            self.prompts.load_state_dict(state.dataloader)
        self.val_loader = validation_loader(config, self.tokenizer) if config.data.val_files else None
        self.total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(self.prompts)
        self.ledger = restored_ledger(config, self.total_steps, step, rollout)
        check_schedules(config, self.batches, self.total_steps)
        check_endpoint(config)

    def build(self, pools: JobPools, progress: Progress) -> PPOTrainer:
        """Start the workers on their devices, and build the trainer.

        Raises:
            WorkerError: a worker failed to start.
        """
        session, config, console = self.session, self.session.config, self.session.console
        console.set_total_steps(self.total_steps)
        advantage = AdvantagePhase(config.algorithm)
        state = session.state(self.prompts, self.total_steps, advantage.kl_controller)
        reporter = session.reporter(state)
        scorers = runner_scorers(config, session.logs, config.trainer.nnodes)
        runners = session.enter(AgentRunners(config, self.tokenizer, pools.trainer, scorers))
        folder, message = session.output_dir, console.message
        roles = RoleBuilder(
            config, self.batches, self.total_steps, pools, folder, message, progress, self.end_tokens
        ).build()
        console.message("\n".join(filter(None, [roles.describe(), runners.wait_ready()])))
        rollouts = Rollouts(
            runners,
            roles.replicas.processes,
            config,
            self.tokenizer,
            self._batch_info(),
            on_lost=roles.replicas.replace,
            state_masking=config.actor_rollout_ref.actor.state_masking,
            store_images=store_images,
        )
        scorer = RewardModelScorer(roles.reward_model, self.reader) if roles.reward_model and self.reader else None
        rewards = RewardPhase(self.reward_functions, self.tokenizer, config.reward, scorer)
        samples = SampleService(config, self.ledger, self.prompts, rollouts, rewards, roles.replicas)
        state.in_flight = samples.state_dict
        recorders = build_recorders(
            config,
            roles.actor,
            list(roles.learners()),
            list(roles.frozen()),
            self._validator(rollouts, rewards),
            self.tokenizer,
            state,
            reporter,
            self.callbacks,
        )
        phases = self._phases(roles, samples, advantage)
        return PPOTrainer(config, roles, phases, recorders, state, reporter, session.tracing)

    def _validator(self, rollouts: Rollouts, rewards: RewardPhase) -> Validator | None:
        if self.val_loader is None:
            return None
        if self.val_functions is not None:
            rewards = RewardPhase(self.val_functions, self.tokenizer, self.session.config.reward)
        return Validator(rollouts, rewards, self.val_loader, self.tokenizer)

    def _phases(self, roles: Roles, samples: SampleService, advantage: AdvantagePhase) -> StepPhases:
        config = self.session.config
        algorithm = config.algorithm
        rows = roles.actor.row_map(ROW_VERB)
        shaping = RewardShaping(algorithm, self.total_steps, rows)
        advantage.rows = rows
        reference: list[BatchPhase] = []
        if roles.reference and shaping.alignment:
            threshold = algorithm.repr_align.ref_alignment.entropy_high_threshold
            length = config.data.max_response_length
            reference.append(
                AlignmentPhase(roles.reference, shaping.alignment, threshold, self.tokenizer, length, rows)
            )
        correction = RolloutCorrectionPhase(
            algorithm.rollout_correction,
            loglinear=config.estimates_proximal_policy,
            version=lambda: roles.replicas.weight_version,
            rows=rows,
        )
        update: list[BatchPhase] = [correction]
        if algorithm.mask_truncated_completions:
            update.append(TruncatedResponsesPhase(rows))
        if algorithm.use_pf_ppo:
            update.append(PreferencePhase(algorithm.pf_ppo, config.trainer.seed, rows))
        return StepPhases(
            samples=samples,
            passes=simultaneous_passes(self._passes(roles, correction)),
            reference=reference,
            shaping=shaping,
            advantage=advantage,
            correction=update,
            updates=simultaneous_passes(self._updates(roles)),
        )

    def _passes(self, roles: Roles, correction: RolloutCorrectionPhase) -> Iterator[ModelPass]:
        """Select the passes before the update; each reads the samples alone."""
        config = self.session.config
        if correction.reads_rollout:
            read = correction.rollout_log_probs
            yield ModelPass("old_log_prob", (), lambda batch, metrics: completed_call(read(batch)))
        else:
            yield verb_pass("old_log_prob", roles.actor, "compute_log_prob")
        if roles.reference and config.uses_ref_log_prob:
            yield verb_pass("ref", roles.reference, "compute_ref_log_prob")
        if teachers := roles.teachers:
            # Several teachers take turns under the driver's control, so nothing else starts until they are done. A
            # single one that is a server uses no device, and computes during the other passes.
            used = [*roles.learners(), *roles.frozen()]
            if len(teachers) == 1:
                used = [*teachers.values()] if config.distillation.local_teachers else []
            phase = TeacherPhase(teachers, config.distillation.teacher_key)
            yield ModelPass("teacher", tuple(group.pool for group in used), phase.submit)
        if roles.critic:
            yield verb_pass("values", roles.critic, "compute_values")

    def _updates(self, roles: Roles) -> Iterator[ModelPass]:
        if roles.critic:
            yield verb_pass("update_critic", roles.critic, "update_critic")
        # During the critic's warm-up the policy stays.
        yield verb_pass("update_actor", roles.actor, "update_actor", self.session.config.trainer.critic_warmup + 1)

    def _batch_info(self) -> dict[str, Any]:
        """``meta_info`` of a training batch for dispatch: mini-batch rows of each update, and whether to balance."""
        rows = {
            f"{phase.name}_mini_batch_rows": phase.samples_per_mini_batch
            for phase in self.batches.phases
            if phase.updates
        }
        balance = self.session.config.trainer.balance_batch
        return {**rows, UPDATE_ROWS: rows["actor_mini_batch_rows"], "balance_batch": balance}
