"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.errors import ConfigError
from megarl.tracking.tracker import RunInfo, Tracker, register_tracker

STEP_METRIC = "training/global_step"


@register_tracker("wandb")
class WandbTracker(Tracker):
    """A Weights & Biases run; ``WANDB_MODE=offline`` keeps it in ``<run folder>/wandb`` and needs no network.

    A resumed run continues the same curves. Steps are an x axis of their own (``training/global_step``): Weights &
    Biases drops a step below the last one it saw, which a resumed run would log.
    """

    apart = True
    package = "wandb"

    @classmethod
    def check(cls) -> None:
        """There must be a login where the mode is online.

        Raises:
            ConfigError: there is none.
        """
        import wandb

        settings = wandb.setup().settings
        if settings.mode == "online" and wandb.api.api_key is None:
            raise ConfigError(
                f"trainer.logger='wandb': there is no login for {settings.base_url}; log in with `wandb login`, "
                "or set WANDB_API_KEY, or WANDB_MODE=offline"
            )

    def __init__(self, run: RunInfo) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off",  # this process prints nothing of the run's
            init_timeout=0.8 * run.timeout_s,
            x_stats_pid=os.getppid(),  # the run's resources, not this process's
        )
        self.run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            id=run.run_id or None,
            resume="allow",
            settings=settings,
        )
        self.run.define_metric("*", step_metric=STEP_METRIC)
        self._wandb = wandb

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send the metrics together with their step."""
        self.run.log({**metrics, STEP_METRIC: step})

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send the answers as a table."""
        if samples:
            columns = list(samples[0])
            rows = [[str(sample.get(column)) for column in columns] for sample in samples]
            self.run.log({"samples": self._wandb.Table(columns=columns, data=rows), STEP_METRIC: step})

    def leftover(self) -> str:
        """The package keeps all that it was given in files, and can send them later."""
        return f"what is missing is sent by: wandb sync {os.path.dirname(self.run.dir)}"

    def finish(self) -> None:
        """Send what is outstanding, end the run, and wait for the package's own process to write its files and exit."""
        self.run.finish()
        self._wandb.teardown()
