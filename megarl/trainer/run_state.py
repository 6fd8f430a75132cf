"""Where a run stands, and how it is saved and continued."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.algorithms import KLController
from megarl.cluster import WorkerGroup, wait_all
from megarl.config.compose import to_yaml
from megarl.config.saving import CheckpointConfig
from megarl.config.schema import TrainConfig
from megarl.config.supervised import SupervisedConfig
from megarl.data import DataProto
from megarl.data.prompt_queue import PromptQueue
from megarl.errors import CheckpointError, ConfigError
from megarl.models import read_model_config
from megarl.trainer.checkpoint_manifest import Score
from megarl.trainer.checkpoint_retention import BestBy, Retention
from megarl.trainer.checkpoint_saver import CheckpointSaver
from megarl.trainer.checkpoint_store import CheckpointStore
from megarl.trainer.stopping import Stop
from megarl.trainer.trainer_state import TrainerState, model_fingerprint

CONFIG_FILE = "config.yaml"
CHECKPOINT_KEYS = {
    "actor": "actor_rollout_ref.actor.checkpoint",
    "critic": "critic.checkpoint",
    "sft": "trainer.checkpoint",
    "reward_model": "trainer.checkpoint",
}
VALIDATION_PREFIXES = ("val-core/", "val-aux/")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resume:
    """A verified checkpoint to continue from."""

    path: Path
    state: TrainerState


def fingerprints(config: TrainConfig | SupervisedConfig) -> dict[str, Any]:
    """What each learning role trains, for the check that a checkpoint is of the same model."""
    if isinstance(config, SupervisedConfig):
        return {config.role: model_fingerprint(read_model_config(config.model.path))}
    prints = {"actor": model_fingerprint(read_model_config(config.actor_rollout_ref.model.path))}
    if config.uses_critic:
        prints["critic"] = model_fingerprint(read_model_config(str(config.critic.model.path)))
    return prints


def role_contents(config: TrainConfig | SupervisedConfig) -> dict[str, CheckpointConfig]:
    """By learning role, what its checkpoints hold and what is restored of them."""
    if isinstance(config, SupervisedConfig):
        return {config.role: config.trainer.checkpoint}
    contents = {"actor": config.actor_rollout_ref.actor.checkpoint}
    if config.uses_critic:
        contents["critic"] = config.critic.checkpoint
    return contents


def inexact_checkpoints(config: TrainConfig | SupervisedConfig) -> list[str]:
    """What to tell of roles whose checkpoints will lack something that an exact continuation needs."""
    if config.trainer.save_freq < 1:
        return []
    return [
        f"checkpoints of the {role} hold {', '.join(saved.save_contents)}: a run that continues from one "
        + (f"starts its {' and '.join(saved.lacking)} anew" if "model" in saved.save_contents else "is impossible")
        for role, saved in role_contents(config).items()
        if saved.lacking
    ]


def checkpoint_store(config: TrainConfig | SupervisedConfig) -> CheckpointStore:
    """The checkpoints of the run."""
    if isinstance(config, SupervisedConfig):
        kept = Retention({config.role: config.trainer.max_ckpt_to_keep})
        return CheckpointStore(str(config.trainer.default_local_dir), kept)
    trainer = config.trainer
    limits = {"actor": trainer.max_actor_ckpt_to_keep}
    if config.uses_critic:
        limits["critic"] = trainer.max_critic_ckpt_to_keep
    best = None if trainer.best_metric is None else BestBy(trainer.best_metric, trainer.best_mode)
    return CheckpointStore(str(trainer.default_local_dir), Retention(limits, best))


def find_resume(config: TrainConfig | SupervisedConfig) -> Resume | None:
    """The checkpoint that the configuration asks to continue from, verified; None to start anew.

    Raises:
        CheckpointError: it is missing, corrupt, of another model, or lacks what is to be restored.
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
        logger.warning("%s was written by other software: %s", path, "; ".join(differing))
    return Resume(path, state)


class RunState:
    """Step, data order and KL coefficient of a run, and its checkpoints.

    Args:
        config: names the checkpoint folder and says how often to save.
        prompts: to train on; stands where the run is to begin.
        kl_controller: of the KL in the reward, None where there is none.
        total_steps: training steps of the whole run.
        resume: checkpoint to continue from.
        stop: says when to end before the last step.
        tell: shows the user a line.

    Attributes:
        step: the step under way, or the last finished one; counted from 1.
        saver: of the checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig | SupervisedConfig,
        prompts: PromptQueue,
        kl_controller: KLController | None,
        total_steps: int,
        resume: Resume | None,
        stop: Stop | None = None,
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.kl_controller = kl_controller
        self.total_steps = total_steps
        self.resume = resume
        self.stop = stop or Stop()
        self.step = 0
        self._position: tuple[int, dict[str, Any]] = (0, {})
        self._undone = False
        self.saver = CheckpointSaver(checkpoint_store(config), role_contents(config), tell)
        self._best_by = self.saver.store.retention.best
        self._score: Score | None = None

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows."""
        return self.step >= self.total_steps

    @property
    def ends(self) -> bool:
        """Whether no step follows in this run."""
        return self.is_last_step or self.stop.reason is not None

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and after the last, is due now; -1 = never."""
        return every > 0 and (self.is_last_step or self.step % every == 0)

    def remaining_prompts(self, count: int) -> Iterator[DataProto]:
        """Prompts of step after step until the last or a reason to end earlier; ``step`` counts along, over all epochs.

        Args:
            count: rows to begin a step with; the step may take more from ``prompts``.
        """
        self.stop.begin()
        while not self.ends:
            self._position = self._position_now()
            self.step += 1
            yield self.prompts.take(count)

    def undo_step(self) -> None:
        """Makes the step before the one under way the last: the run cannot go on, and nothing was learned since.

        What is saved from now on stands before the batch of prompts that was taken for the step.
        """
        self.step -= 1
        self._undone = True

    def _position_now(self) -> tuple[int, dict[str, Any]]:
        return self.prompts.epoch, self.prompts.state_dict()

    def restore(self, learners: Iterable[WorkerGroup]) -> None:
        """Continue from the checkpoint, if there is one: weights, optimizers, random states, KL.

        ``prompts`` stand where the checkpoint left it already: other data than the checkpoint's is refused early.
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
        if self.kl_controller is not None and state.kl_controller:  # none where the KL is new in this run
            self.kl_controller.load_state_dict(state.kl_controller)
        self.step = state.step
        self.saver.newest = path

    def note_validation(self, metrics: Mapping[str, float]) -> None:
        """Takes what validation said of the weights of this step, where there was one.

        Raises:
            ConfigError: ``trainer.best_metric`` is not among the metrics of a validation.
        """
        names = [name for name in metrics if name.startswith(VALIDATION_PREFIXES)]
        self._score = None
        if self._best_by is None or not names:
            return
        if self._best_by.metric not in metrics:
            raise ConfigError(
                f"trainer.best_metric={self._best_by.metric!r} is not a validation metric of this run; those are: "
                f"{', '.join(sorted(names))}"
            )
        self._score = Score(self._best_by.metric, float(metrics[self._best_by.metric]))

    def must_save(self) -> bool:
        """Whether to save after this step: it is due, the best so far, or the last before the run has to end."""
        reason = self.stop.step_done(self.saver.slowest_s)
        ends_early = reason is not None and not self.is_last_step
        return ends_early or self.due(self.config.trainer.save_freq) or self._is_best()

    def _is_best(self) -> bool:
        if self._best_by is None or self._score is None:
            return False
        on_disk = self.saver.store.best()
        known = [score.value for score in (self.saver.score_under_way, on_disk and on_disk.score) if score]
        return all(self._best_by.is_better(self._score.value, value) for value in known)

    def end_here(self) -> None:
        """Makes the step under way the last one: what the run was for is reached."""
        self.total_steps = self.step

    def save(self, learners: Iterable[WorkerGroup], files: Sequence[Path] = ()) -> None:
        """Begin to save everything that :meth:`restore` needs, whole or not at all.

        Args:
            learners: the groups whose state is saved.
            files: of the run, which one that continues takes over; those that are not there are left out.
        """
        if self._score is not None and math.isnan(self._score.value):
            self._score = None

        epoch, position = self._position if self._undone else self._position_now()

        def write_own(folder: Path) -> None:
            TrainerState(
                step=self.step,
                epoch=epoch,
                kl_controller=self.kl_controller.state_dict() if self.kl_controller else {},
                dataloader=position,
                model=fingerprints(self.config),
                contents={role: saved.save_contents for role, saved in role_contents(self.config).items()},
            ).write(folder)
            (folder / CONFIG_FILE).write_text(to_yaml(self.config))
            for file in files:
                if file.exists():
                    shutil.copyfile(file, folder / file.name)

        self.saver.begin(self.step, list(learners), write_own, self._score)

    def save_now(self, learners: Iterable[WorkerGroup], files: Sequence[Path] = ()) -> Path | None:
        """Save, unless this step is saved already or nothing was learned yet, and wait for it.

        Returns:
            The newest checkpoint, None if there is none.

        Raises:
            CheckpointError: it could not be saved.
        """
        self.saver.wait()
        if self.step > 0 and self.step not in self.saver.store.steps():
            self.save(learners, files)
            self.saver.wait()
            self.check_last_save()
        return self.saver.newest

    def finish(self) -> str | None:
        """Completes the save under way; what to tell of a run that ends early, None where it does not."""
        self.saver.wait()
        if self.stop.reason is None or self.is_last_step:
            return None
        place = self.saver.newest
        if self.saver.failure is not None:
            return f"Ended after step {self.step} of {self.total_steps} ({self.stop.reason}), not saved."
        if place is None:
            return f"Ended before the first step ({self.stop.reason}); nothing is lost. To begin, run the same command."
        return (
            f"Ended after step {self.step} of {self.total_steps} ({self.stop.reason}), saved in {place}. To go on, "
            "run the same command with trainer.resume_mode=auto, or from elsewhere with "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={place}"
        )

    def check_last_save(self) -> None:
        """Ends a run as failed whose end is in no checkpoint, though it was to be.

        Raises:
            CheckpointError: the last save failed.
        """
        if self.saver.failure is not None:
            raise CheckpointError(
                f"the last save of the run, after step {self.step}, failed: {self.saver.failure}; "
                f"kept: {self.saver.newest or 'no checkpoint'}"
            )
