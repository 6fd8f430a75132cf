"""The training loop of PPO, GRPO and their relatives."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megarl.base.errors import StepImpossible
from megarl.base.reductions import Metrics, combine_metrics
from megarl.cluster.calls import wait_all
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto, stratified_minibatch_order, token_counts
from megarl.data.order import permutation
from megarl.samples.selection import join
from megarl.samples.service import SampleService
from megarl.trainer.callbacks import Callback, TrainerView
from megarl.trainer.phases.advantage_phase import AdvantagePhase, RewardShaping
from megarl.trainer.phases.model_passes import ROW_VERB, BatchPhase, ModelPass
from megarl.trainer.records.reporting import RunReporter, RunSummary
from megarl.trainer.records.tracing import RunTracing
from megarl.trainer.roles.worker_groups import Roles
from megarl.trainer.state.run_state import RunState
from megarl.workers.row_math import GENERATED_TOKENS

MINI_BATCH_ROWS = ("actor_mini_batch_rows", "critic_mini_batch_rows")
"""Keys in a batch's ``meta_info``: rows of a mini-batch over all ranks, by role."""


@dataclass(frozen=True)
class StepPhases:
    """Phases of a training step, selected from the configuration when the trainer is built.

    Attributes:
        passes: log-probs of the policy, the reference and the teachers, and values. Those of a group run at the same
            time, on separate devices.
        reference: further passes over the reference, which read the columns of ``passes``; empty without them.
        shaping: from scores to shaped rewards.
        correction: change the rows, weights and mask that the updates train on.
        updates: optimizer steps of critic and actor; those of a group run at the same time.
    """

    samples: SampleService
    passes: Sequence[Sequence[ModelPass]]
    reference: Sequence[BatchPhase]
    shaping: RewardShaping
    advantage: AdvantagePhase
    correction: Sequence[BatchPhase]
    updates: Sequence[Sequence[ModelPass]]


class TrainedBatches:
    """Joins the batches of a step and their metrics."""

    def __init__(self) -> None:
        self._batches: list[DataProto] = []
        self._trained: list[DataProto] = []
        self._metrics: list[tuple[Metrics, int]] = []

    def add(self, batch: DataProto, trained: DataProto, metrics: Metrics) -> None:
        """Add a scored batch, and the rows of its updates: PF-PPO draws other rows of the batch."""
        self._batches.append(batch)
        self._trained.append(trained)
        self._metrics.append((metrics, len(batch)))

    def joined(self) -> tuple[DataProto, DataProto, Metrics]:
        """Return the scored rows and the trained rows of the step, and its metrics; see :func:`combine_metrics`."""
        tokens = sum(batch.meta_info[GENERATED_TOKENS] for batch in self._batches)
        for batch in (*self._batches, *self._trained):
            batch.meta_info[GENERATED_TOKENS] = tokens
        return join(self._batches), join(self._trained), combine_metrics(self._metrics)


@dataclass(eq=False)
class PPOTrainer:
    """Runs the phases of each training step in order; workers compute, the driver decides.

    Args:
        roles: worker groups; a role that the algorithm does not need is None.
        recorders: run after each step: metrics, samples, validation, user callbacks, checkpoint.
    """

    config: TrainConfig
    roles: Roles
    phases: StepPhases
    recorders: Sequence[Callback]
    state: RunState
    reporter: RunReporter
    tracing: RunTracing

    def __post_init__(self) -> None:
        self.phase = self.reporter.phase

    def fit(self) -> RunSummary:
        """Train until the last step; resume, validate, save and report on the way.

        Each phase is timed as ``timing_s/<name>``. The comments name the processes that do its work.
        """
        phases = self.phases
        for step in self.start():
            trained_on = TrainedBatches()
            with self.phase("step"), contextlib.closing(self.batches(step)) as batches:
                # 1. Rollout replicas generate (gen); reward processes and the reward model score (reward).
                for batch, metrics in batches:
                    # 2. Driver: order the rows so that all mini-batches have equal work; tokens go to the object store.
                    batch = self.balance(batch)
                    batch = self.roles.actor.store(ROW_VERB, batch)
                    # 3. Actor, reference, teacher and critic workers: old_log_prob, ref, teacher and values.
                    for passes in phases.passes:
                        for columns in self.run_passes(passes, batch, step, metrics):
                            batch = batch.union(columns)
                    # 4. Reference workers: representations (repr_align).
                    for optional in phases.reference:
                        if optional.is_active(batch, step):
                            with self.phase(optional.name):
                                batch = optional.run(batch, step, metrics)
                    # 5. Actor workers: tokens of shaped rewards and advantages, then weights and mask of the updates;
                    # driver: group baselines, moments, and the rows to train on.
                    with self.phase("adv"):
                        batch = phases.advantage.compute(phases.shaping.shape(batch, step, metrics), metrics)
                        trained = batch
                        for optional in phases.correction:
                            if optional.is_active(trained, step):
                                trained = optional.run(trained, step, metrics)
                    # 6. Critic and actor workers: optimizer steps over the mini-batches (update_critic, update_actor).
                    for updates in phases.updates:
                        for update_metrics in self.run_passes(updates, trained, step, metrics):
                            metrics |= update_metrics
                    trained_on.add(batch, trained, metrics)
                batch, trained, metrics = trained_on.joined()
                # 7. Actor workers send their weights to the rollout replicas.
                with self.phase("update_weights"):
                    metrics |= self.sync_weights()
            # 8. Driver: metrics, samples, validation (testing), callbacks, checkpoint (save_checkpoint).
            self.finish_step(batch, trained, metrics)
        return self.close()

    def run_passes(self, passes: Sequence[ModelPass], batch: DataProto, step: int, metrics: Metrics) -> list[Any]:
        """Run the passes of a step that begin together, each timed until its workers are done; return their results."""
        active = [one for one in passes if step >= one.first_step]
        if not active:
            return []
        with self.reporter.phases([one.name for one in active]) as end:
            return wait_all([one.submit(batch, metrics) for one in active], on_end=end)

    def start(self) -> Iterator[int]:
        """Resume, send the weights to the rollout replicas, and yield the number of each step."""
        self.tracing.begin_step(0)
        self.state.restore(self.roles.learners())
        self.phases.samples.restore(self.state.resume.state.rollout if self.state.resume else {}, self.state.step)
        self.roles.replicas.sync_weights()
        for recorder in self.recorders:
            recorder.on_train_start(self.view())
        if self.config.trainer.val_only:
            return
        for step in self.state.remaining_steps():
            self.tracing.begin_step(step)
            yield step

    def batches(self, step: int) -> Generator[tuple[DataProto, Metrics]]:
        """Yield the scored batches of a step with their metrics: one, or mini-batches in disaggregated mode.

        Samples that end while the trainer trains are received until the generator is closed.

        Raises:
            StepImpossible: there is no batch to train on, for example because all rollout replicas are lost. The
                finished steps are saved, unless the step has trained in part.
        """
        trained, holds = False, self.config.holds_proximal_policy
        with contextlib.closing(self.phases.samples.batches(step, self.phase)) as source:
            while True:
                try:
                    item = next(source, None)
                except StepImpossible as error:
                    if trained:
                        raise self.state.stop_within_step(error) from error
                    self.state.undo_step()
                    raise self.state.save_and_stop(error, self.roles.learners(), self.reporter.lasting_files) from error
                if item is None:
                    break
                if holds and not trained:
                    with self.phase("old_log_prob"):
                        self.roles.actor.hold_weights()
                yield item
                trained = True
        if holds:
            self.roles.actor.release_weights()

    def sync_weights(self) -> Metrics:
        """Send the actor's weights to the rollout replicas; see :meth:`SampleService.sync_weights`.

        Raises:
            StepImpossible: no conversation in flight can go on, for example because all rollout replicas are lost. The
                finished steps are saved, this one included.
        """
        try:
            return self.phases.samples.sync_weights()
        except StepImpossible as error:
            raise self.state.save_and_stop(error, self.roles.learners(), self.reporter.lasting_files) from error

    def balance(self, batch: DataProto) -> DataProto:
        """Order the batch so that its mini-batches have similar lengths; samples of a prompt stay together.

        With ``actor.shuffle``, shuffle the samples instead. The order serves actor and critic, and does not depend on
        their numbers of ranks.
        """
        if self.config.actor_rollout_ref.actor.shuffle:
            return batch.reorder(permutation(len(batch), self.config.trainer.seed, self.state.step).tolist())
        if not self.config.trainer.balance_batch:
            return batch
        rows = [batch.meta_info[name] for name in MINI_BATCH_ROWS if name in batch.meta_info]
        mini_batches = math.lcm(*(len(batch) // size for size in rows))
        return batch.reorder(
            stratified_minibatch_order(token_counts(batch), mini_batches, self.config.samples_per_prompt)
        )

    def finish_step(self, batch: DataProto, trained: DataProto, metrics: Metrics) -> None:
        """Call the recorders of the step; each sees the metrics of the recorders before it."""
        view = self.view(metrics, batch, trained)
        for recorder in self.recorders:
            metrics |= recorder.on_step_end(view) or {}

    def view(
        self, metrics: Metrics | None = None, batch: DataProto | None = None, trained: DataProto | None = None
    ) -> TrainerView:
        """Build the read-only view of the run for recorders and callbacks."""
        return TrainerView(
            config=self.config,
            folder=self.reporter.folder,
            step=self.state.step,
            total_steps=self.state.total_steps,
            epoch=self.state.prompts.epoch,
            metrics=MappingProxyType({} if metrics is None else metrics),
            seconds=MappingProxyType(dict(self.reporter.seconds)),
            hidden=MappingProxyType(dict(self.reporter.hidden)),
            batch=batch,
            trained=trained,
        )

    def close(self) -> RunSummary:
        """Complete the last save, export the policy if configured, and write the summary."""
        self.phases.samples.close()
        trainer = self.config.trainer
        folder = None if trainer.val_only else trainer.hf_export_dir
        return self.reporter.close_training(self.state, folder, self.roles.actor.export_hf, self._end_recorders)

    def _end_recorders(self) -> None:
        for recorder in self.recorders:
            recorder.on_train_end(self.view())
