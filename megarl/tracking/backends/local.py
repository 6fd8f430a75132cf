"""Trackers that write here and now: console, jsonl, tensorboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.tracking.console import Console
from megarl.tracking.metrics_file import FILE_NAME, MetricsFile
from megarl.tracking.tracker import RunInfo, Tracker, register_tracker


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

    package = "tensorboard"

    def __init__(self, run: RunInfo) -> None:
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
