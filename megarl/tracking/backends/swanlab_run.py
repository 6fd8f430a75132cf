"""SwanLab."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.errors import ConfigError
from megarl.tracking.tracker import RunInfo, Tracker, register_tracker


@register_tracker("swanlab")
class SwanlabTracker(Tracker):
    """A SwanLab experiment; ``SWANLAB_MODE=offline`` or ``local`` keep it in ``<run folder>/swanlog``.

    A resumed run continues the same experiment where SwanLab can do that: from version 0.6.13 on, and in its cloud
    mode only. Elsewhere a new experiment of the same name begins.
    """

    apart = True
    package = "swanlab"

    @classmethod
    def check(cls) -> None:
        """There must be a login in cloud mode; without one the package would ask at the terminal.

        Raises:
            ConfigError: there is none, or the mode is not known.
        """
        import swanlab.package
        from swanlab.data.utils import SwanLabMode

        mode, modes = os.environ.get("SWANLAB_MODE", "cloud"), [mode.value for mode in SwanLabMode]
        if mode not in modes:
            raise ConfigError(f"trainer.logger='swanlab': SWANLAB_MODE={mode!r} must be one of {', '.join(modes)}")
        try:
            if mode == "cloud":
                swanlab.package.get_key()
        except swanlab.error.KeyFileError:
            raise ConfigError(
                "trainer.logger='swanlab': there is no login; log in with `swanlab login`, or set SWANLAB_API_KEY, "
                "or SWANLAB_MODE=offline or local"
            ) from None

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        run.folder.mkdir(parents=True, exist_ok=True)
        known = inspect.signature(swanlab.init).parameters
        continued = {"id": run.run_id, "resume": "allow"} if "resume" in known and run.run_id else {}
        cloud = os.environ.get("SWANLAB_MODE", "cloud") == "cloud"
        self.run = swanlab.init(
            project=run.project,
            experiment_name=run.name,
            config=dict(run.config),
            logdir=str(run.folder / "swanlog"),
            settings=swanlab.Settings(log_proxy_type="none"),  # this process prints nothing of the run's
            **(continued if cloud else {}),
        )
        self._swanlab = swanlab

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Hand the metrics over."""
        self.run.log(dict(metrics), step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Hand the answers over as a table."""
        if samples:
            columns = list(samples[0])
            rows = [[str(sample.get(column)) for column in columns] for sample in samples]
            self.run.log({"samples": self._swanlab.echarts.Table().add(columns, rows)}, step)

    def leftover(self) -> str:
        """The package keeps all that it was given in files, and can send them later."""
        return f"what is missing is sent by: swanlab sync {self.run.public.swanlog_dir}/run-*"

    def finish(self) -> None:
        """Send what is outstanding and end the experiment."""
        self._swanlab.finish()
