"""The phase loop of PPO and its critic-free relatives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.cluster import seqlen_metrics
from megarl.config.schema import TrainConfig
from megarl.data import DataProto, alike_mini_batches
from megarl.errors import StepImpossible
from megarl.trainer.advantage import AdvantagePhase
from megarl.trainer.correction import CorrectionPhase
from megarl.trainer.gathering import Gathering
from megarl.trainer.metrics import Metrics, batch_metrics, phase_tokens, rollout_mismatch_metrics, throughput_metrics
from megarl.trainer.rank_balance import rank_balance
from megarl.trainer.reporting import RunReporter, RunSummary
from megarl.trainer.reward_phase import RewardPhase
from megarl.trainer.roles import Roles
from megarl.trainer.rollout import RolloutPhase
from megarl.trainer.run_state import RunState
from megarl.trainer.samples import describe_samples, dump_log_probs, dump_samples, evenly
from megarl.trainer.shaping import RewardShaping
from megarl.trainer.token_values import samples_with_tokens
from megarl.trainer.validation import Validator

MINI_BATCH_ROWS = ("actor_mini_batch_rows", "critic_mini_batch_rows")
"""Facts of a batch: rows of a mini-batch over all ranks, by role."""
SAMPLES_PER_STEP_IN_REPORT = 16
SAMPLES_PER_VALIDATION_IN_REPORT = 64


class PPOTrainer:
    """Runs the phases in order and decides; the workers do the mathematics.

    What varies between algorithms, layouts and engines was chosen when the parts were built: a role that an algorithm
    does not need is None.
    """

    def __init__(
        self,
        config: TrainConfig,
        roles: Roles,
        rollout: RolloutPhase,
        rewards: RewardPhase,
        shaping: RewardShaping,
        advantage: AdvantagePhase,
        correction: CorrectionPhase,
        validator: Validator | None,
        state: RunState,
        reporter: RunReporter,
    ) -> None:
        self.config = config
        self.roles = roles
        self.rollout = rollout
        self.rewards = rewards
        self.shaping = shaping
        self.advantage = advantage
        self.correction = correction
        self.validator = validator
        self.state = state
        self.reporter = reporter
        self.gathering = Gathering(config)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and show that it is under way; after it, a save that has been written is completed."""
        with self.reporter.phase(name):
            yield
        self.state.saver.advance()

    def fit(self) -> RunSummary:
        """Train until the last step; continue, validate, save and report on the way."""
        self.reporter.begin_step(0)
        self.state.restore(self.roles.learners())
        self.roles.sync_weights()
        self.validate_before()
        steps = self.state.remaining_prompts(self.gathering.round_size)
        for prompts in steps if not self.config.trainer.val_only else ():
            metrics: Metrics = {}
            self.reporter.begin_step(self.state.step)
            with self.phase("step"):
                batch = self.balance(self.collect(prompts, metrics))
                with self.phase("old_log_prob"):
                    batch = batch.union(self.correction.old_log_probs(batch, self.roles.actor))
                if self.roles.reference and self.config.uses_ref_log_prob:
                    with self.phase("ref"):
                        batch = batch.union(self.roles.reference.compute_ref_log_prob(batch))
                if self.roles.reference and self.shaping.aligns(batch, self.state.step):
                    with self.phase("repr_align"):
                        batch = self.shaping.compare(batch, self.roles.reference, metrics)
                if self.roles.critic:
                    with self.phase("values"):
                        batch = batch.union(self.roles.critic.compute_values(batch))
                with self.phase("adv"):
                    batch = self.advantage.compute(self.shaping.shape(batch, self.state.step, metrics), metrics)
                    seed = (self.config.trainer.seed, self.state.step)
                    learned = self.advantage.preferred(self.correction.apply(batch, metrics), seed, metrics)
                if self.roles.critic:
                    with self.phase("update_critic"):
                        metrics |= self.roles.critic.update_critic(learned)
                if self.state.step > self.config.trainer.critic_warmup:
                    with self.phase("update_actor"):
                        metrics |= self.roles.actor.update_actor(learned)
                with self.phase("update_weights"):
                    metrics |= self.roles.sync_weights()
            self.finish_step(batch, metrics)
        return self.close()

    def collect(self, prompts: DataProto, metrics: Metrics) -> DataProto:
        """Scored answers to learn from: to the prompts, and to others where theirs do not do.

        Raises:
            StepImpossible: there are none, for all rollout replicas are lost, say; what was learned until then is
                saved.
        """
        try:
            missing = len(prompts)
            while missing:
                told: Metrics = {}
                with self.phase("gen"):
                    self.roles.ready_engines()
                    answers = self.generate(prompts, told)
                    self.roles.free_engines()
                with self.phase("reward"):
                    missing = self.gathering.add(self.score(answers, told), told)
                if missing:
                    prompts = self.state.prompts.take(missing)
            return self.gathering.finish(metrics)
        except StepImpossible as error:
            self.state.undo_step()
            raise self._ended(error) from error

    def _ended(self, error: StepImpossible) -> StepImpossible:
        """The error with where the run ends; what was learned until then is saved."""
        place = self.state.save_now(self.roles.learners(), self.reporter.lasting_files)
        saved = f"saved in {place}, from where it continues" if place else "nothing was learned yet"
        return StepImpossible(f"{error}\nThe run ends after step {self.state.step}; {saved}.")

    def generate(self, prompts: DataProto, metrics: Metrics) -> DataProto:
        """Answers to prompts, in a round of the step's."""
        number, baseline = self.gathering.rounds, self.config.uses_baselines
        return self.rollout.generate_sequences(prompts, self.state.step, metrics, number, with_baseline=baseline)

    def score(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """The batch with its scores; what could not be scored is masked and counted, or stops the run."""
        scored = self.rewards.score(batch)
        metrics |= scored.metrics
        return scored.batch

    def finish_step(self, batch: DataProto, metrics: Metrics) -> None:
        """Validate and save where due, and record the step."""
        trainer, step, seconds = self.config.trainer, self.state.step, dict(self.reporter.seconds)
        metrics |= {"training/global_step": float(step), "training/epoch": float(self.state.prompts.epoch)}
        self.state.prompts.update(batch)
        metrics |= self.state.prompts.metrics()
        metrics |= batch_metrics(batch, self.config.data.max_prompt_length, self.config.data.max_response_length)
        metrics |= throughput_metrics(batch, seconds, trainer.num_devices)
        metrics |= self.balance_metrics(batch)
        if self.compares_log_probs:
            metrics |= rollout_mismatch_metrics(batch)
        self.reporter.keep_balance(step, rank_balance(batch, self.roles.learners(), seconds))
        self.dump(batch)
        if self.state.due(trainer.test_freq):
            with self.phase("testing"):
                metrics |= self.validate()
        self.state.note_validation(metrics)
        metrics |= self.state.saver.take_metrics()
        self.reporter.log_step(step, metrics, phase_tokens(batch, seconds))
        if self.state.must_save():
            with self.phase("save_checkpoint"):
                self.state.save(self.roles.learners(), self.reporter.lasting_files)

    @property
    def compares_log_probs(self) -> bool:
        """Whether the engine's log-probs are compared with the actor's, which there must be."""
        return self.config.actor_rollout_ref.rollout.calculate_log_probs and not self.correction.bypass

    def balance(self, batch: DataProto) -> DataProto:
        """The batch in an order whose mini-batches have alike lengths; samples of one prompt stay together.

        The order suits actor and critic, and does not depend on how many ranks they have.
        """
        if not self.config.trainer.balance_batch:
            return batch
        rows = [batch.meta_info[name] for name in MINI_BATCH_ROWS if name in batch.meta_info]
        mini_batches = math.lcm(*(len(batch) // size for size in rows))
        lengths = batch.tensors["attention_mask"].sum(-1).tolist()
        return batch.reorder(alike_mini_batches(lengths, mini_batches, self.config.samples_per_prompt))

    def balance_metrics(self, batch: DataProto) -> Metrics:
        """``global_seqlen/*`` of the actor's update, before and after balancing."""
        actor = self.roles.actor
        lengths = batch.tensors["attention_mask"].sum(-1).tolist()
        costs = actor.budgets["update_actor"].cost.of(lengths)
        rows = batch.meta_info["actor_mini_batch_rows"]
        return seqlen_metrics(lengths, costs, actor.plan("update_actor", batch), rows)

    def dump(self, batch: DataProto) -> None:
        """Write the step's answers where asked for, and keep some for the report."""
        tokenizer, step, folder = self.rewards.tokenizer, self.state.step, self.config.trainer.rollout_data_dir
        if folder:
            dump_samples(folder, step, describe_samples(batch, tokenizer, step))
            if self.compares_log_probs:
                dump_log_probs(folder, step, batch, self.config.actor_rollout_ref)
        shown = batch[evenly(range(len(batch)), SAMPLES_PER_STEP_IN_REPORT)]
        self.reporter.keep_samples(step, samples_with_tokens(shown, tokenizer, step), "train")

    def validate_before(self) -> None:
        """The validation before the first step, where the configuration asks for it."""
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and self.state.step == 0):
            with self.phase("testing"):
                metrics = self.validate()
            self.state.note_validation(metrics)
            self.reporter.log_validation(self.state.step, metrics)

    def validate(self) -> Metrics:
        """Validation metrics of the weights that the engine has; answers go to file and trackers.

        Raises:
            StepImpossible: too many answers cannot be scored, say; what was learned until then is saved.
        """
        assert self.validator is not None, "checked in the configuration: validation needs data.val_files"
        trainer, step = self.config.trainer, self.state.step
        try:
            metrics, samples = self.validator.run(step)
        except StepImpossible as error:
            raise self._ended(error) from error
        if trainer.validation_data_dir:
            dump_samples(trainer.validation_data_dir, step, samples)
        self.reporter.keep_samples(step, evenly(samples, SAMPLES_PER_VALIDATION_IN_REPORT), "validation")
        self.reporter.log_samples(step, evenly(samples, trainer.log_val_generations))
        return metrics

    def close(self) -> RunSummary:
        """Complete the last save, export the policy where asked for, and close the run with summary and report."""
        ended_early = self.state.finish()
        folder = self.config.trainer.hf_export_dir
        if ended_early:
            folder = None  # there is no time for it, and the run is not over
            self.reporter.console.warn(ended_early)
        if folder:
            with self.reporter.console.phase("export", announce=True):
                self.roles.actor.export_hf(folder)
        summary = self.reporter.finish(folder)
        self.state.check_last_save()
        return summary
