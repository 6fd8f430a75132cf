"""Jobs from Python: :func:`train` starts one in a process of its own, and :class:`Run` reads its results.

A job has processes for its driver, workers and engines anyway. One of its own leaves nothing behind in the caller: no
Ray, no signal handlers, no process groups. A notebook can therefore run one job after the other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.base.errors import MegarlError
from megarl.base.packages import require_package
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.overrides import override_of
from megarl.ops.jobs.command import SUMMARY_FILE
from megarl.ops.jobs.table import JOBS, compose_job

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from megarl.tracking.jsonl_files import MetricsRow

_REWARD = "critic/score/mean"
_TAIL_LINES = 30


class RunFailed(MegarlError):
    """The job ended early; the message has the end of its output."""


def train(
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    job: str = "train",
    wait: bool = True,
) -> Run:
    """Run a training job, as ``megarl JOB --config-name CONFIG KEY=VALUE ...`` does.

    Its files are below ``outputs/`` in the working folder, and paths are relative to it.

    Args:
        config: name of a shipped YAML file, or the path of one; None = the job's default.
        overrides: values by key, or words of a command line such as ``--data=FILE`` or ``KEY=VALUE``.
        job: ``train``, ``grpo``, ``sft``, ``preference``, ...; as on the command line.
        wait: return when the job has ended, and print its output meanwhile; False = return at once.

    Returns:
        The run. Without ``trainer.hf_export_dir``, the policy is exported to the run's folder.

    Raises:
        ConfigError, ModelError: the configuration is wrong; nothing was started.
        RunFailed: the job failed, with ``wait``.
    """
    trains = {name for name, entry in JOBS.items() if issubclass(entry.schema, TrainConfig | SupervisedConfig)}
    if job not in trains:
        raise ValueError(f"job={job!r}, expected one of {', '.join(sorted(trains))}")
    words = _words(config, overrides)
    trainer: Any = compose_job(job, words).trainer
    folder = _new_folder(Path("outputs", trainer.experiment_name).absolute())
    words.append(override_of("hydra.run.dir", str(folder)))
    if trainer.hf_export_dir is None:
        words.append(override_of("trainer.hf_export_dir", str(folder / "policy")))
    run = Run(folder, [sys.executable, "-m", "megarl", job, *words])
    return run.wait() if wait else run


class Run:
    """A job that runs in a process of its own, or has ended.

    Args:
        folder: folder of the run, with its metrics, logs and report.
        command: of the job; its output is printed here.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the job once, from `stop`
        )
        self._printer = threading.Thread(target=self._print, daemon=True)
        self._printer.start()

    @property
    def running(self) -> bool:
        """Whether the job has not ended yet."""
        return self._process.poll() is None

    def wait(self) -> Run:
        """Wait for the end of the job, and return this run. Ctrl-C ends the job as on a terminal.

        Raises:
            RunFailed: the job ended early.
        """
        while True:
            try:
                code = self._process.wait()
                self._printer.join()
                break
            except KeyboardInterrupt:
                self.stop()
        if code:
            tail = "".join(self._tail)
            raise RunFailed(f"the job in {self.folder} ended with exit code {code}:\n{tail}", code="worker.job-failed")
        return self

    def stop(self) -> None:
        """End the job as Ctrl-C does: one that saves checkpoints finishes its step and saves; twice ends it at once."""
        self._process.send_signal(signal.SIGINT)

    @property
    def metrics(self) -> list[MetricsRow]:
        """Metrics of the steps so far, one row per step; ``row["step"]`` is the step."""
        from megarl.tracking import read_metrics

        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        """Key numbers of the ended run (:class:`~megarl.trainer.records.reporting.RunSummary`).

        Raises:
            FileNotFoundError: the job has not ended.
        """
        result: dict[str, Any] = json.loads((self.folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return result

    @property
    def policy(self) -> Path:
        """Folder of the trained policy, which ``AutoModelForCausalLM.from_pretrained`` loads."""
        return Path(self.summary["hf_dir"])

    @property
    def report(self) -> Path:
        """The run's HTML page."""
        return self.folder / "report.html"

    def plot(self, *names: str) -> Figure:
        """Plot metrics against the step, so far.

        Args:
            names: as in ``docs/reference/metrics.md``; default: the mean score.
        """
        require_package("plotly", "report", "Run.plot")
        from plotly.graph_objects import Figure, Scatter

        rows = self.metrics
        figure = Figure(layout={"xaxis": {"title": "step"}})
        for name in names or (_REWARD,):
            points = [(row["step"], row[name]) for row in rows if name in row]
            steps, values = zip(*points, strict=True) if points else ((), ())
            figure.add_trace(Scatter(x=steps, y=values, name=name, mode="lines+markers", showlegend=True))
        return figure

    def __repr__(self) -> str:
        rows = self.metrics
        step = int(rows[-1]["step"]) if rows else 0
        return f"Run({str(self.folder)!r}, {'running' if self.running else 'ended'}, step {step})"

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line)
            print(line, end="", flush=True)


def _words(config: str | Path | None, overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    words = []
    if config is not None:
        path = Path(config)
        is_file = path.suffix in (".yaml", ".yml")
        words += ["--config-dir", str(path.absolute().parent)] if is_file else []
        words += ["--config-name", path.stem if is_file else str(config)]
    if isinstance(overrides, Mapping):
        return words + [override_of(key, value) for key, value in overrides.items()]
    return words + list(overrides)


def _new_folder(parent: Path) -> Path:
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folders = (parent / (f"{name}_{number}" if number else name) for number in range(1000))
    return next(folder for folder in folders if not folder.exists())
