"""The trackers that come with megarl: console, jsonl, tensorboard, wandb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from megarl.errors import ConfigError
from megarl.tracking.console import Console
from megarl.tracking.metrics_file import FILE_NAME, MetricsFile
from megarl.tracking.tracker import RunInfo, Tracker, load_package, register_tracker

STEP_METRIC = "training/global_step"


@register_tracker("console")
class ConsoleTracker(Tracker):
    """One table row per step on the run's console, or on a new one."""

    def __init__(self, run: RunInfo) -> None:
        self._owns_console = run.console is None
        self.console = run.console or Console()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Print the row."""
        self.console.log(metrics, step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Print the answers."""
        self.console.samples(samples, step)

    def finish(self) -> None:
        """Give the terminal back where this tracker opened it."""
        if self._owns_console:
            self.console.close()


@register_tracker("jsonl")
class JsonlTracker(Tracker):
    """``metrics.jsonl`` in the run's folder; see :mod:`megarl.tracking.metrics_file`."""

    def __init__(self, run: RunInfo) -> None:
        self.file = MetricsFile(run.folder / FILE_NAME, run.resumed_step)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Append a row."""
        self.file.append(step, metrics)

    def finish(self) -> None:
        """Close the file."""
        self.file.close()


@register_tracker("tensorboard")
class TensorboardTracker(Tracker):
    """Event files in ``<run folder>/tensorboard``."""

    def __init__(self, run: RunInfo) -> None:
        load_package("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resumed_step is None else run.resumed_step + 1
        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write each answer as text."""
        for number, sample in enumerate(samples):
            lines = (f"**{name}**\n\n    " + str(value).replace("\n", "\n    ") for name, value in sample.items())
            self.writer.add_text(f"samples/{number}", "\n\n".join(lines), step)

    def finish(self) -> None:
        """Write what is outstanding and close."""
        self.writer.close()


@register_tracker("wandb")
class WandbTracker(Tracker):
    """A Weights & Biases run; ``WANDB_MODE=offline`` keeps it in ``<run folder>/wandb`` and needs no network.

    The run's id is kept in the run's folder, so that a resumed run continues the same curves. Steps are an x axis of
    their own (``training/global_step``): Weights & Biases drops a step below the last one it saw, which a resumed
    run would log.

    Raises:
        ConfigError: Weights & Biases refuses to start the run, for want of a login say.
    """

    def __init__(self, run: RunInfo) -> None:
        wandb = load_package("wandb", "wandb")
        run.folder.mkdir(parents=True, exist_ok=True)
        id_file = run.folder / "wandb_run_id"
        if run.resumed_step is None or not id_file.exists():
            id_file.write_text(uuid4().hex[:12])
        try:
            self.run = wandb.init(
                project=run.project,
                name=run.name,
                dir=str(run.folder),
                config=dict(run.config),
                id=id_file.read_text(),
                resume="allow",
                # the live line of a terminal would fill the run's log with its frames
                settings=wandb.Settings(console="off" if run.console and run.console.output.is_terminal else "auto"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"trainer.logger='wandb': {error}; log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error
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

    def finish(self) -> None:
        """Send what is outstanding, end the run, and wait for the package's own process to write its files and exit."""
        self.run.finish()
        self._wandb.teardown()
