"""State of a run: step, data order, checkpoints, resume and the end of the run."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.algorithms import KLController
from megarl.base.errors import CheckpointError, ConfigError, StepImpossible
from megarl.base.provenance import command_with
from megarl.cluster.calls import wait_all
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.compose import to_yaml
from megarl.config.schema.jobs import SupervisedConfig, TrainConfig
from megarl.config.schema.model import CheckpointConfig
from megarl.data import DataProto
from megarl.data.loader import PromptQueue
from megarl.models import read_model_config
from megarl.trainer.state.checkpoint_manifest import BestBy, Retention, Score
from megarl.trainer.state.checkpoint_saver import CheckpointSaver
from megarl.trainer.state.checkpoint_store import CheckpointStore
from megarl.trainer.state.stopping import CTRL_C, StopCondition
from megarl.trainer.state.trainer_state import TrainerState, model_fingerprint

CONFIG_FILE = "config.yaml"
CHECKPOINT_KEYS = {
    "actor": "actor_rollout_ref.actor.checkpoint",
    "critic": "critic.checkpoint",
    "sft": "trainer.checkpoint",
    "reward_model": "trainer.checkpoint",
    "preference": "trainer.checkpoint",
}
VALIDATION_PREFIXES = ("val-core/", "val-aux/")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resume:
    """A verified checkpoint to resume from."""

    path: Path
    state: TrainerState


def fingerprints(config: TrainConfig | SupervisedConfig) -> dict[str, Any]:
    """Compute the model fingerprint of each learning role, to check that a checkpoint is of the same model."""
    if isinstance(config, SupervisedConfig):
        return {config.role: model_fingerprint(read_model_config(config.model.path))}
    policy = config.actor_rollout_ref
    actor = read_model_config(policy.model.path).with_trained_tower(policy.trains_tower)
    prints = {"actor": model_fingerprint(actor)}
    if config.uses_critic:
        critic = config.critic.model
        model = read_model_config(str(critic.path)).with_trained_tower(critic.trains_tower)
        prints["critic"] = model_fingerprint(model)
    return prints


def role_contents(config: TrainConfig | SupervisedConfig) -> dict[str, CheckpointConfig]:
    """List the ``checkpoint`` section of each learning role: contents to save and to load."""
    if isinstance(config, SupervisedConfig):
        return {config.role: config.trainer.checkpoint}
    contents = {"actor": config.actor_rollout_ref.actor.checkpoint}
    if config.uses_critic:
        contents["critic"] = config.critic.checkpoint
    return contents


def inexact_checkpoints(config: TrainConfig | SupervisedConfig) -> list[str]:
    """Describe the roles whose checkpoints lack contents that an exact resume needs."""
    if config.trainer.save_freq < 1:
        return []
    return [
        f"checkpoints of the {role} hold {', '.join(saved.save_contents)}: a run that resumes from one "
        + (
            f"restarts its {' and '.join(saved.missing_contents)}"
            if "model" in saved.save_contents
            else "is impossible"
        )
        for role, saved in role_contents(config).items()
        if saved.missing_contents
    ]


def checkpoint_store(config: TrainConfig | SupervisedConfig, run_id: str | None = None) -> CheckpointStore:
    """Build the checkpoint store of a run with its retention.

    Args:
        run_id: ID of the run; None to read only.
    """
    root, overwrite = str(config.trainer.default_local_dir), config.trainer.overwrite_output
    if isinstance(config, SupervisedConfig):
        kept = Retention({config.role: config.trainer.max_ckpt_to_keep})
        return CheckpointStore(root, kept, run_id, overwrite=overwrite)
    trainer = config.trainer
    limits = {"actor": trainer.max_actor_ckpt_to_keep}
    if config.uses_critic:
        limits["critic"] = trainer.max_critic_ckpt_to_keep
    best = None if trainer.best_metric is None else BestBy(trainer.best_metric, trainer.best_mode)
    return CheckpointStore(root, Retention(limits, best), run_id, overwrite=overwrite)


def find_resume(config: TrainConfig | SupervisedConfig) -> Resume | None:
    """Find and verify the checkpoint to resume from; None to start at step 0.

    Raises:
        CheckpointError: it is missing, corrupt, of another model, or lacks contents to restore.
    """
    trainer, contents = config.trainer, role_contents(config)
    path = checkpoint_store(config).resolve(trainer.resume_mode, trainer.resume_from_path, contents)
    if path is None:
        return None
    state = TrainerState.read(path)
    state.check_model(fingerprints(config))
    for role, checkpoint in contents.items():
        state.check_contents(role, checkpoint.load_contents, f"{CHECKPOINT_KEYS[role]}.load_contents")
    if differing := state.differing_versions():
        logger.warning("%s was written by other software versions: %s", path, "; ".join(differing))
    return Resume(path, state)


class RunState:
    """Step, data order and KL coefficient of a run, and its checkpoints.

    Args:
        prompts: queue of training prompts, at the position of the first step.
        kl_controller: of the KL penalty in the reward; None without one.

    Attributes:
        step: the current step, or the last finished one; counted from 1.
        in_flight: returns the samples in flight, which checkpoints have; None = there are none.
    """

    def __init__(
        self,
        config: TrainConfig | SupervisedConfig,
        prompts: PromptQueue,
        kl_controller: KLController | None,
        total_steps: int,
        resume: Resume | None,
        stop: StopCondition | None = None,
        message: Callable[[str], None] = logger.warning,
        run_id: str | None = None,
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.kl_controller = kl_controller
        self.total_steps = total_steps
        self.resume = resume
        self.stop = stop or StopCondition()
        self.step = 0
        self.in_flight: Callable[[], dict[str, Any]] | None = None
        self.on_step_begin: Callable[[], object] = lambda: None
        self.saver = CheckpointSaver(checkpoint_store(config, run_id), role_contents(config), message)
        self._best_by = self.saver.store.retention.best
        self._score: Score | None = None

    @property
    def is_last_step(self) -> bool:
        """Whether this is the last step of the whole run."""
        return self.step >= self.total_steps

    @property
    def ends(self) -> bool:
        """Whether this is the last step of this run."""
        return self.is_last_step or self.stop.reason is not None

    def due(self, every: int) -> bool:
        """Return whether an action is due that runs every ``every`` steps and after the last; -1 = never."""
        return every > 0 and (self.is_last_step or self.step % every == 0)

    def remaining_prompts(self, count: int) -> Iterator[DataProto]:
        """Yield the prompts of each step until the run ends; ``step`` counts along, over all epochs.

        Args:
            count: rows at the start of a step; the step may take more from ``prompts``.
        """
        for _ in self.remaining_steps():
            yield self.prompts.take(count)

    def remaining_steps(self) -> Iterator[int]:
        """Yield the number of each step until the run ends; ``step`` counts along, over all epochs."""
        self.stop.begin()
        while not self.ends:
            self.step += 1
            self.on_step_begin()
            yield self.step

    def undo_step(self) -> None:
        """Return to the step before the current one, which failed before any update.

        A later save has the prompts that were taken and not trained, as work in flight.
        """
        self.step -= 1

    def restore(self, learners: Iterable[WorkerGroup]) -> None:
        """Restore weights, optimizers, random states and the KL coefficient from the checkpoint, if any.

        ``prompts`` are restored before the workers start, so that other data than the checkpoint's fails early.
        """
        if self.resume is None:
            return
        path, state = self.resume.path, self.resume.state
        contents = role_contents(self.config)
        wait_all(
            [
                group.submit("load_checkpoint", str(path / group.role), contents[group.role].load_contents)
                for group in learners
            ]
        )
        if self.kl_controller is not None and state.kl_controller:  # empty if this run adds the KL penalty
            self.kl_controller.load_state_dict(state.kl_controller)
        self.step = state.step
        self.saver.newest = path

    def note_validation(self, metrics: Mapping[str, float]) -> None:
        """Record the validation score of this step, if ``metrics`` has one.

        Raises:
            ConfigError: ``trainer.best_metric`` is not a metric of the validation.
        """
        names = [name for name in metrics if name.startswith(VALIDATION_PREFIXES)]
        self._score = None
        if self._best_by is None or not names:
            return
        if self._best_by.metric not in metrics:
            raise ConfigError(
                f"trainer.best_metric={self._best_by.metric!r} is not a validation metric of this run; the metrics "
                f"are: {', '.join(sorted(names))}",
                code="checkpoint.no-best-metric",
            )
        self._score = Score(self._best_by.metric, float(metrics[self._best_by.metric]))

    def must_save(self) -> bool:
        """Return whether to save after this step: when due, at the best score, or before an early end."""
        reason = self.stop.step_done(self.saver.slowest_s)
        ends_early = reason is not None and not self.is_last_step
        return ends_early or self.due(self.config.trainer.save_freq) or self._is_best()

    def _is_best(self) -> bool:
        if self._best_by is None or self._score is None:
            return False
        on_disk = self.saver.store.best()
        best_values = [score.value for score in (self.saver.score_under_way, on_disk and on_disk.score) if score]
        return all(self._best_by.is_better(self._score.value, value) for value in best_values)

    def end_here(self) -> None:
        """Make the current step the last one, since the target is reached."""
        self.total_steps = self.step

    def save(self, learners: Iterable[WorkerGroup], files: Sequence[Path] = ()) -> None:
        """Start an atomic save of everything that :meth:`restore` needs.

        Args:
            files: files of the run that a resumed run continues; missing ones are skipped.
        """
        if self._score is not None and math.isnan(self._score.value):
            self._score = None

        rollout = self.in_flight() if self.in_flight else {}
        epoch, position = self.prompts.epoch, self.prompts.state_dict()
        config = to_yaml(self.config)  # in this thread, which knows the run's references

        def write_driver_files(folder: Path) -> None:
            TrainerState(
                step=self.step,
                epoch=epoch,
                kl_controller=self.kl_controller.state_dict() if self.kl_controller else {},
                dataloader=position,
                rollout=rollout,
                model=fingerprints(self.config),
                contents={role: saved.save_contents for role, saved in role_contents(self.config).items()},
            ).write(folder)
            (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
            for file in files:
                if file.exists():
                    shutil.copyfile(file, folder / file.name)

        self.saver.begin(self.step, list(learners), write_driver_files, self._score)

    def save_now(self, learners: Iterable[WorkerGroup], files: Sequence[Path] = ()) -> Path | None:
        """Save and wait, unless this step is already saved or no step is finished.

        Returns:
            The newest checkpoint; None without one.

        Raises:
            CheckpointError: the save failed.
        """
        self.saver.wait()
        if self.step > 0 and self.step not in self.saver.store.own_steps():
            self.save(learners, files)
            self.saver.wait()
            self.check_last_save()
        return self.saver.newest

    def save_and_stop(
        self, error: StepImpossible, learners: Iterable[WorkerGroup], files: Sequence[Path] = ()
    ) -> StepImpossible:
        """Save the finished steps, and return the error with the last step and the checkpoint in its message."""
        folder = self.save_now(learners, files)
        saved = f"saved in {folder}; resume from there" if folder else "no step is finished"
        return StepImpossible(f"{error.text}\nThe run ends after step {self.step}; {saved}.", code=error.code)

    def stop_within_step(self, error: StepImpossible) -> StepImpossible:
        """Complete the last save, and return the error of a step that has trained in part and cannot be saved."""
        self.saver.wait()
        newest = self.saver.newest
        saved = f"resume from {newest}" if newest else "there is no checkpoint"
        text = f"{error.text}\nStep {self.step} has trained in part and is not saved; {saved}."
        return StepImpossible(text, code=error.code)

    @property
    def stopped(self) -> str | None:
        """Reason of an end before the last step; None without one."""
        return None if self.is_last_step else self.stop.reason

    def finish(self) -> str | None:
        """Complete the pending save; return a message if the run ends early, else None."""
        self.saver.wait()
        if self.stopped is None:
            return None
        folder = self.saver.newest
        if self.saver.failure is not None:
            return f"Ended after step {self.step} of {self.total_steps} ({self.stopped}), not saved."
        if folder is None:
            return f"Ended before the first step ({self.stopped}); nothing is lost. To start:\n  {command_with([])}"
        return (
            f"Ended after step {self.step} of {self.total_steps} ({self.stopped}), saved in {folder}. To go on:\n"
            f"  {self._continuation()}\nor from elsewhere: the same command with "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )

    def describe_interruption(self, cause: str = CTRL_C) -> str:
        """Describe a run that ends at once, in the middle of a step, without a save."""
        place = f"in step {self.step} of {self.total_steps}" if self.step else "before the first step"
        reason = ": trainer.save_freq=-1" if self.config.trainer.save_freq < 1 else ""
        where = f"Ended {place} ({cause}), not saved{reason}."
        if self.saver.newest is not None:
            return f"{where} To go on from {self.saver.newest}:\n  {self._continuation()}"
        return f"{where} To start again:\n  {command_with([])}"

    def _continuation(self) -> str:
        """The command that resumes this run from its folder."""
        trainer, overrides = self.config.trainer, []
        if trainer.resume_mode not in ("auto", "must"):
            overrides.append("trainer.resume_mode=auto")
        if trainer.resume_from_path is not None:
            overrides.append("trainer.resume_from_path=null")
        return command_with(overrides)

    def check_last_save(self) -> None:
        """Fail the run if its last save failed.

        Raises:
            CheckpointError: the last save failed.
        """
        if self.saver.failure is not None:
            raise CheckpointError(
                f"the last save of the run, after step {self.step}, failed: {self.saver.failure}; "
                f"kept: {self.saver.newest or 'no checkpoint'}",
                code="checkpoint.last-save-failed",
            )
