"""Callbacks: user code at the hooks of the training loop, named by ``trainer.callbacks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.base.user_code import load_user_class
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto


@dataclass(frozen=True)
class TrainerView:
    """Read-only view of a run, as callbacks receive it.

    Attributes:
        step: number of the finished step, counted from 1; 0 before the first.
        total_steps: number of steps of the whole run.
        epoch: number of finished passes over the training data.
        metrics: metrics of the step so far; in ``on_validation`` those of the validation.
        seconds: seconds of the step by phase.
        hidden: part of these seconds during a longer phase on other devices, by phase.
        batch: batch of the step with all columns; None outside a step. Do not change it.
        trained: rows of the updates: those of ``batch``, or PF-PPO's draw from them; None outside a step.
        checkpoint: folder of the complete checkpoint, in ``on_save``; else None.
    """

    config: TrainConfig
    folder: Path
    step: int
    total_steps: int
    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)
    batch: DataProto | None = None
    trained: DataProto | None = None
    checkpoint: Path | None = None


class Callback:
    """Base class of callbacks; every hook does nothing by default.

    The driver builds one instance without arguments before any worker starts. Hooks run in the driver, so the training
    loop waits for them. An exception in a hook ends the run.
    """

    def on_train_start(self, view: TrainerView) -> None:
        """Run before the first step, after resume and the validation before training."""

    def on_step_end(self, view: TrainerView) -> Mapping[str, float] | None:
        """Run after the phases of each step; returned metrics are logged with those of the step."""

    def on_validation(self, view: TrainerView) -> None:
        """Run after each validation, with its metrics."""

    def on_save(self, view: TrainerView) -> None:
        """Run for each complete checkpoint; an asynchronous save completes at the end of a later step."""

    def on_train_end(self, view: TrainerView) -> None:
        """Run after the last step, its save and the export, before the trackers close."""


def load_callbacks(specs: Sequence[str]) -> list[Callback]:
    """Build the callbacks of ``trainer.callbacks``.

    Args:
        specs: ``path.py:Class`` or ``package.module.Class`` each.

    Raises:
        ConfigError: a class cannot be imported, or does not derive from :class:`Callback`.
    """
    return [load_user_class(spec, Callback, "trainer.callbacks")() for spec in specs]
