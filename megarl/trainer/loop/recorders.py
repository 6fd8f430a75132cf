"""Recorders: write the metrics, samples, balance, validation and checkpoint of each finished step.

A recorder is a :class:`~megarl.trainer.callbacks.Callback` with access to the parts of the trainer. The trainer calls
all recorders and user callbacks in the order of :func:`build_recorders`; metrics that one returns are visible to the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from megarl.base.errors import StepImpossible
from megarl.base.reductions import Metrics
from megarl.cluster.partition import seqlen_metrics
from megarl.cluster.role_groups import ActorGroup, MegatronGroup
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.schema.algorithm import DISAGGREGATED
from megarl.config.schema.jobs import TrainConfig
from megarl.data import token_counts
from megarl.models import read_model_config
from megarl.trainer.callbacks import Callback, TrainerView
from megarl.trainer.phases.model_passes import ROW_VERB
from megarl.trainer.phases.validation import Validator
from megarl.trainer.records.reporting import RunReporter
from megarl.trainer.records.sample_records import (
    Sample,
    describe_samples,
    dump_log_probs,
    dump_samples,
    evenly_spaced,
    rows_of_groups,
    samples_with_tokens,
)
from megarl.trainer.records.step_metrics import (
    batch_metrics,
    explained_by_rounding,
    phase_tokens,
    rank_balance,
    throughput_metrics,
)
from megarl.trainer.state.run_state import RunState

SAMPLES_PER_STEP_IN_REPORT = 16
SAMPLES_PER_VALIDATION_IN_REPORT = 64


@dataclass(eq=False)
class StepMetrics(Callback):
    """Computes the metrics of the batch: progress, scores, lengths, throughput, balance and rollout mismatch.

    Also collects the pass metrics of frozen roles; trained roles report theirs with the update.

    Args:
        explained: in step 1, compare the difference with this one, see :func:`batch_metrics`; None = do not.
    """

    actor: ActorGroup
    frozen: Sequence[MegatronGroup]
    state: RunState
    compare_log_probs: bool
    explained: float | None = None

    def on_step_end(self, view: TrainerView) -> Metrics:
        """Return the metrics, and update the prompt queue with the scores of its prompts."""
        batch, trained, data = view.batch, view.trained, view.config.data
        assert batch is not None and trained is not None
        # Not in the first step of a resumed run, whose metrics equal those of an undisturbed one.
        explained = self.explained if view.step == 1 else None
        metrics = {"training/global_step": float(view.step), "training/epoch": float(view.epoch)}
        self.state.prompts.update(batch)
        metrics |= self.state.prompts.metrics()
        metrics |= batch_metrics(
            batch,
            data.max_prompt_length,
            data.max_response_length,
            self.actor.row_map(ROW_VERB),
            compare_log_probs=self.compare_log_probs or explained is not None,
            explained=explained,
        )
        metrics |= throughput_metrics(batch, trained, view.seconds, view.config.num_devices, view.hidden)
        lengths = token_counts(trained)
        costs = self.actor.budgets["update_actor"].cost.of(lengths)
        metrics |= seqlen_metrics(lengths, costs, self.actor.partition("update_actor", trained))
        for group in self.frozen:
            metrics |= group.pass_metrics()
        return metrics


@dataclass(eq=False)
class BalanceRecorder(Callback):
    """Records the work and busy seconds of each data-parallel rank in ``balance.jsonl``."""

    learners: Sequence[WorkerGroup]
    reporter: RunReporter

    def on_step_end(self, view: TrainerView) -> None:
        """Append the ranks' lists of the step."""
        assert view.trained is not None
        self.reporter.keep_balance(view.step, rank_balance(view.trained, self.learners, view.seconds))


@dataclass(eq=False)
class SampleRecorder(Callback):
    """Dumps the samples of a step to ``trainer.rollout_data_dir``, and keeps some for the report."""

    tokenizer: PreTrainedTokenizerBase
    reporter: RunReporter
    compare_log_probs: bool

    def on_step_end(self, view: TrainerView) -> None:
        """Write the samples of the step."""
        batch, step, folder = view.batch, view.step, view.config.trainer.rollout_data_dir
        assert batch is not None
        if folder:
            dump_samples(folder, step, describe_samples(batch, self.tokenizer, step))
            if self.compare_log_probs:
                dump_log_probs(folder, step, batch, view.config.actor_rollout_ref)
        shown = batch[rows_of_groups(batch.non_tensor_batch["uid"].tolist(), SAMPLES_PER_STEP_IN_REPORT)]
        self.reporter.keep_samples(step, samples_with_tokens(shown, self.tokenizer, step), "train")


@dataclass(eq=False)
class ValidationRecorder(Callback):
    """Validates if due, dumps the samples, and calls ``on_validation`` of the user callbacks.

    In disaggregated mode with ``max_staleness`` above 0, a validation runs beside the next training step. Its metrics
    are logged with that step; ``val-aux/step`` names the validated step. It blocks in the last two steps, whose results
    would be logged together, and with ``trainer.best_metric``, since the best weights are saved before training
    changes them.
    """

    validator: Validator | None
    state: RunState
    learners: Sequence[WorkerGroup]
    reporter: RunReporter
    callbacks: Sequence[Callback]

    def on_train_start(self, view: TrainerView) -> None:
        """Validate before the first step, if configured, and log the metrics."""
        trainer = view.config.trainer
        if trainer.val_only or (trainer.val_before_train and view.step == 0):
            metrics = self.validate(view)
            self.state.note_validation(metrics)
            self.reporter.log_validation(view.step, metrics)
        elif view.step > 0 and self._is_due(view) and self._runs_beside(view):
            self._begin(view.step)  # the run was resumed from a checkpoint with this validation in flight

    def on_step_end(self, view: TrainerView) -> Metrics:
        """Return the metrics of the step's validation if due; beside training, of the validation before."""
        metrics: Metrics = {}
        if self.validator is not None and (step := self.validator.step_in_flight) is not None:
            metrics = self._record(replace(view, step=step), self.validator.end) | {"val-aux/step": step}
        if self._is_due(view):
            if self._runs_beside(view):
                self._begin(view.step)
            else:
                metrics = self.validate(view)
        self.state.note_validation(metrics)
        return metrics

    def _is_due(self, view: TrainerView) -> bool:
        return self.state.due(view.config.trainer.test_freq)

    def _runs_beside(self, view: TrainerView) -> bool:
        keys, best = view.config.async_training, view.config.trainer.best_metric
        overlaps = keys.mode == DISAGGREGATED and keys.max_staleness > 0
        return overlaps and best is None and view.step + 1 < view.total_steps

    def _begin(self, step: int) -> None:
        assert self.validator is not None, "checked in the configuration: validation needs data.val_files"
        with self.reporter.phase("testing"):
            self.validator.begin(step)

    def validate(self, view: TrainerView) -> Metrics:
        """Validate the weights that the engine has, and wait for the results.

        Raises:
            StepImpossible: validation failed, for example because too many samples have no score. The finished steps
                are saved.
        """
        assert self.validator is not None, "checked in the configuration: validation needs data.val_files"
        return self._record(view, partial(self.validator.run, view.step))

    def _record(self, view: TrainerView, results: Callable[[], tuple[Metrics, list[Sample]]]) -> Metrics:
        """Get the results of the validation of ``view.step``, write the samples and call the callbacks."""
        trainer, step = view.config.trainer, view.step
        with self.reporter.phase("testing"):
            try:
                metrics, samples = results()
            except StepImpossible as error:
                raise self.state.save_and_stop(error, self.learners, self.reporter.lasting_files) from error
            if trainer.validation_data_dir:
                dump_samples(trainer.validation_data_dir, step, samples)
            self.reporter.keep_samples(step, evenly_spaced(samples, SAMPLES_PER_VALIDATION_IN_REPORT), "validation")
            # Trackers take steps in order, so a validation beside training is logged with the current step.
            self.reporter.log_samples(self.state.step, evenly_spaced(samples, trainer.log_val_generations))
        for callback in self.callbacks:
            callback.on_validation(replace(view, metrics=metrics))
        return metrics


@dataclass(eq=False)
class MetricsLogger(Callback):
    """Logs the metrics of the step to trackers and console."""

    state: RunState
    reporter: RunReporter

    def on_step_end(self, view: TrainerView) -> None:
        """Log the metrics of all recorders before this one, and those of finished saves."""
        assert view.batch is not None
        metrics = {**view.metrics, **self.state.saver.take_metrics()}
        self.reporter.log_step(view.step, metrics, phase_tokens(view.batch, view.seconds, view.trained))


@dataclass(eq=False)
class CheckpointRecorder(Callback):
    """Saves a checkpoint if due, and calls ``on_save`` of the user callbacks for complete ones."""

    state: RunState
    learners: Sequence[WorkerGroup]
    reporter: RunReporter
    callbacks: Sequence[Callback]

    def on_step_end(self, view: TrainerView) -> None:
        """Save if due."""
        if self.state.must_save():
            with self.reporter.phase("save_checkpoint"):
                self.state.save(self.learners, self.reporter.lasting_files)
        self._report_saves(view)

    def on_train_end(self, view: TrainerView) -> None:
        """Report the saves that completed at the end of the run."""
        self._report_saves(view)

    def _report_saves(self, view: TrainerView) -> None:
        for folder in self.state.saver.take_completed():
            for callback in self.callbacks:
                callback.on_save(replace(view, checkpoint=folder))


def build_recorders(
    config: TrainConfig,
    actor: ActorGroup,
    learners: Sequence[WorkerGroup],
    frozen: Sequence[MegatronGroup],
    validator: Validator | None,
    tokenizer: PreTrainedTokenizerBase,
    state: RunState,
    reporter: RunReporter,
    callbacks: Sequence[Callback],
) -> list[Callback]:
    """Build the recorders of a run, with the user callbacks before metrics are logged."""
    # In bypass mode, or with an estimate, the actor computes no log-probs to compare the engine's with.
    computes = not (config.algorithm.rollout_correction.bypass_mode or config.estimates_proximal_policy)
    compare_log_probs = config.actor_rollout_ref.rollout.calculate_log_probs and computes
    model = read_model_config(config.actor_rollout_ref.model.path)
    explained = explained_by_rounding(config, model) if computes else None
    return [
        StepMetrics(actor, frozen, state, compare_log_probs=compare_log_probs, explained=explained),
        BalanceRecorder(learners, reporter),
        SampleRecorder(tokenizer, reporter, compare_log_probs=compare_log_probs),
        ValidationRecorder(validator, state, learners, reporter, callbacks),
        *callbacks,
        MetricsLogger(state, reporter),
        CheckpointRecorder(state, learners, reporter, callbacks),
    ]
