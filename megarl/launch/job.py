"""From a job's command line to what it needs of a cluster, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.cli import JOBS, compose_job
from megarl.config.parts import TrainingRunConfig
from megarl.errors import ConfigError
from megarl.launch.settings import Device, JobToRun

RESUMING = ("auto", "must")
JOB_NAMES = f"{', '.join([*JOBS][:-1])} or {[*JOBS][-1]}"


def read_job(words: Sequence[str], max_restarts: int) -> JobToRun:
    """What a job of megarl's needs, by its configuration.

    Args:
        words: the job's name and its arguments, as after ``megarl``.
        max_restarts: how often it may be started again.

    Raises:
        ConfigError, ModelError: the configuration is wrong, or does not go with restarts.
    """
    name, *arguments = words
    config = compose_job(name, arguments)
    trainer = config.trainer
    notes: tuple[str, ...] = ()
    if max_restarts and isinstance(trainer, TrainingRunConfig):
        notes = _check_restarts(trainer)
    folder = trainer.default_local_dir if isinstance(trainer, TrainingRunConfig) and trainer.save_freq > 0 else None
    device: Device = "cpu" if trainer.device == "cpu" else "cuda" if trainer.device == "cuda" else "auto"
    return JobToRun(
        words=tuple(words),
        is_megarl=True,
        name=trainer.experiment_name,
        nodes=trainer.nnodes,
        device=device,
        devices=trainer.n_gpus_per_node,
        checkpoint_dir=folder or "",
        notes=notes,
        is_dry=isinstance(trainer, TrainingRunConfig) and trainer.dry_run,
    )


def other_command(words: Sequence[str], nodes: int | None, devices: int | None, device: Device) -> JobToRun:
    """A program of one's own, which joins the cluster that ``RAY_ADDRESS`` names.

    Raises:
        ConfigError: nothing says how many machines and devices it needs.
    """
    if nodes is None or devices is None:
        raise ConfigError(f"-- {' '.join(words)}: say what it needs by --nodes and --devices-per-node")
    return JobToRun(tuple(words), False, "command", nodes, device, devices)


def is_job(word: str) -> bool:
    """Whether a word is the name of a job of megarl's."""
    return word in JOBS


def _check_restarts(trainer: TrainingRunConfig) -> tuple[str, ...]:
    """A restart runs the same command again, so that command must be one that continues.

    Returns:
        What the user should know.

    Raises:
        ConfigError: it would not continue, or from another run's checkpoint.
    """
    if trainer.resume_mode not in RESUMING:
        raise ConfigError(
            f"trainer.resume_mode={trainer.resume_mode}: a restart (--max-restarts) would begin anew, or at the same "
            "checkpoint again. Set trainer.resume_mode=auto, and a trainer.default_local_dir of the run's own"
        )
    if trainer.save_freq < 1:
        return ("trainer.save_freq=-1: nothing is saved, so a restart begins anew",)
    return ()
