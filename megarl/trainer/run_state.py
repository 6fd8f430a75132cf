"""Where a run stands, and how it is saved and continued."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.algorithms import KLController
from megarl.cluster import wait_all
from megarl.config.schema import TrainConfig
from megarl.data import DataProto, StatefulLoader
from megarl.models import read_model_config
from megarl.trainer.checkpoint_store import CheckpointStore
from megarl.trainer.roles import Roles
from megarl.trainer.trainer_state import TrainerState, model_fingerprint


@dataclass(frozen=True)
class Resume:
    """A verified checkpoint to continue from."""

    path: Path
    state: TrainerState


def fingerprints(config: TrainConfig) -> dict[str, Any]:
    """What each learning role trains, for the check that a checkpoint is of the same model."""
    prints = {"actor": model_fingerprint(read_model_config(config.actor_rollout_ref.model.path))}
    if config.uses_critic:
        prints["critic"] = model_fingerprint(read_model_config(str(config.critic.model.path)))
    return prints


def find_resume(config: TrainConfig) -> Resume | None:
    """The checkpoint that the configuration asks to continue from, verified; None to start anew.

    Raises:
        CheckpointError: it is missing, corrupt, or of another model.
    """
    trainer = config.trainer
    store = CheckpointStore(str(trainer.default_local_dir), trainer.max_ckpt_to_keep)
    path = store.resolve(trainer.resume_mode, trainer.resume_from_path)
    if path is None:
        return None
    state = TrainerState.read(path)
    state.check_model(fingerprints(config))
    return Resume(path, state)


class RunState:
    """Step, data order and KL coefficient of a run, and its checkpoints.

    Args:
        config: names the checkpoint folder and says how often to save.
        loader: of the training prompts.
        kl_controller: of the KL in the reward, None where there is none.
        total_steps: training steps of the whole run.
        resume: checkpoint to continue from.

    Attributes:
        step: the step under way, or the last finished one; counted from 1.
    """

    def __init__(
        self,
        config: TrainConfig,
        loader: StatefulLoader,
        kl_controller: KLController | None,
        total_steps: int,
        resume: Resume | None,
    ) -> None:
        self.config = config
        self.loader = loader
        self.kl_controller = kl_controller
        self.total_steps = total_steps
        self.resume = resume
        self.step = 0
        self.store = CheckpointStore(str(config.trainer.default_local_dir), config.trainer.max_ckpt_to_keep)

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows."""
        return self.step >= self.total_steps

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and after the last, is due now; -1 = never."""
        return every > 0 and (self.is_last_step or self.step % every == 0)

    def remaining_prompts(self) -> Iterator[DataProto]:
        """Batches of prompts until the last step, epoch after epoch; ``step`` counts along."""
        while not self.is_last_step:
            for prompts in self.loader:
                self.step += 1
                yield prompts
                if self.is_last_step:
                    return

    def restore(self, roles: Roles) -> None:
        """Continue from the checkpoint, if there is one: weights, optimizers, random states, KL.

        The loader stands where the checkpoint left it already: other data than the checkpoint's is refused early.
        """
        if self.resume is None:
            return
        path, state = self.resume.path, self.resume.state
        wait_all([group.submit("load_checkpoint", str(path / group.role)) for group in roles.learners()])
        if self.kl_controller is not None and state.kl_controller:  # none where the KL is new in this run
            self.kl_controller.load_state_dict(state.kl_controller)
        self.step = state.step

    def save(self, roles: Roles, metrics_file: Path | None = None) -> None:
        """Save everything that :meth:`restore` needs, and the metrics so far; whole or not at all."""
        with self.store.saving(self.step) as folder:
            wait_all([group.submit("save_checkpoint", str(folder / group.role)) for group in roles.learners()])
            TrainerState(
                step=self.step,
                epoch=self.loader.epoch,
                kl_controller=self.kl_controller.state_dict() if self.kl_controller else {},
                dataloader=self.loader.state_dict(),
                model=fingerprints(self.config),
            ).write(folder)
            if metrics_file is not None and metrics_file.exists():
                shutil.copyfile(metrics_file, folder / metrics_file.name)
