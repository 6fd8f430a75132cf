"""The trackers that megarl includes: console, jsonl, tensorboard, wandb, swanlab, mlflow; importing registers them.

wandb, swanlab and mlflow log asynchronously, in a background process or thread. But their login, initialization and
finish block the calling process, and may hang or raise. So they run in a subprocess with a bounded queue and retries.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.base.errors import ConfigError
from megarl.base.files import write_error
from megarl.tracking.console import Console
from megarl.tracking.jsonl_files import METRICS_FILE, MetricsFile
from megarl.tracking.tracker import RunInfo, Tracker, register_tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WANDB_STEP_METRIC = "training/global_step"
MLFLOW_RUN_TAG = "megarl.run_id"
MLFLOW_METRICS_PER_CALL, MLFLOW_PARAMS_PER_CALL = 1000, 100  # limits of an MLflow server
MLFLOW_PARAM_CHARACTERS = 6000
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^/\w.\- :]")


@register_tracker("console")
class ConsoleTracker(Tracker):
    """Prints a table row per step on the run's console, or on a new console."""

    def __init__(self, run: RunInfo) -> None:
        self._is_new_console = run.console is None
        self.console = run.console or Console()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Print the row."""
        self.console.log(metrics, step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Print the samples."""
        self.console.samples(samples, step)

    def finish(self) -> None:
        """Close a console that this tracker created."""
        if self._is_new_console:
            self.console.close()


@register_tracker("jsonl")
class JsonlTracker(Tracker):
    """``metrics.jsonl`` in the run's folder; see :mod:`megarl.tracking.jsonl_files`."""

    def __init__(self, run: RunInfo) -> None:
        self.file = MetricsFile(run.folder / METRICS_FILE, run.resumed_step)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Append a row."""
        self.file.append(step, metrics)


@register_tracker("tensorboard")
class TensorboardTracker(Tracker):
    """Writes event files in ``<run folder>/tensorboard``; after a failed write it begins another file."""

    package = "tensorboard"

    def __init__(self, run: RunInfo) -> None:
        self._folder = str(run.folder / "tensorboard")
        self._purge = None if run.resumed_step is None else run.resumed_step + 1
        self._writer: SummaryWriter | None = None

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one scalar per metric."""
        with self._open() as writer:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write each sample as text."""
        with self._open() as writer:
            for number, sample in enumerate(samples):
                lines = (f"**{name}**\n\n    " + str(value).replace("\n", "\n    ") for name, value in sample.items())
                writer.add_text(f"samples/{number}", "\n\n".join(lines), step)

    def finish(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[SummaryWriter]:
        """Yield the writer; a writer that a full disk stopped once refuses everything, and is replaced."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(self._folder, purge_step=self._purge)
            self._purge = None
        try:
            yield self._writer
        except OSError:
            stopped, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                stopped.close()
            raise


@register_tracker("wandb")
class WandbTracker(Tracker):
    """A Weights & Biases run; ``WANDB_MODE=offline`` keeps it in ``<run folder>/wandb`` and needs no network.

    A resumed run continues the same curves. The x axis is the metric ``training/global_step``, not wandb's step: wandb
    drops steps below the last one, and a resumed run logs such steps.
    """

    in_subprocess = True
    package = "wandb"

    @classmethod
    def check(cls) -> None:
        """Check for a login in online mode: ``WANDB_API_KEY``, the settings file, or netrc.

        Raises:
            ConfigError: there is no login.
        """
        import wandb

        settings = wandb.setup().settings
        try:
            if settings.mode == "online" and not _has_wandb_login(settings):
                raise ConfigError(
                    f"trainer.logger='wandb': there is no login for {settings.base_url}; log in with `wandb login`, "
                    "or set WANDB_API_KEY, or WANDB_MODE=offline",
                    code="tracking.no-login",
                )
        finally:
            wandb.teardown()  # ends the service process, which the tracker's own process starts again

    def __init__(self, run: RunInfo) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off",  # this process has no output of the run
            init_timeout=0.8 * run.timeout_s,
            x_stats_pid=os.getppid(),  # the resources of the driver, not of this process
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
        self.run.define_metric("*", step_metric=WANDB_STEP_METRIC)
        self._wandb = wandb

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send the metrics with their step."""
        self.run.log({**metrics, WANDB_STEP_METRIC: step})

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send the samples as a table."""
        if samples:
            table = self._wandb.Table(**_table(samples))
            self.run.log({"samples": table, WANDB_STEP_METRIC: step})

    def leftover(self) -> str:
        """Name the command that sends the records later; the package keeps them in files."""
        return f"send the missing records by: wandb sync {Path(self.run.dir).parent}"

    def finish(self) -> None:
        """Send all records, end the run, and wait for the exit of wandb's service process."""
        self.run.finish()
        self._wandb.teardown()


def _table(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    columns = list(samples[0])
    return {"columns": columns, "data": [[str(sample.get(name)) for name in columns] for sample in samples]}


def _has_wandb_login(settings: Any) -> bool:
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    try:
        from wandb.sdk.lib.wbauth import read_netrc_auth
    except ImportError:  # wandb before 0.22
        import wandb

        return wandb.api.api_key is not None
    return read_netrc_auth(host=settings.base_url) is not None


@register_tracker("swanlab")
class SwanlabTracker(Tracker):
    """A SwanLab experiment; ``SWANLAB_MODE=offline`` or ``local`` keep it in ``<run folder>/swanlog``.

    A resumed run continues the same experiment in cloud mode, from SwanLab 0.6.13 on. Otherwise a new experiment of
    the same name begins.
    """

    in_subprocess = True
    package = "swanlab"

    @classmethod
    def check(cls) -> None:
        """Check for a login in cloud mode; without it the package prompts at the terminal.

        Raises:
            ConfigError: there is no login, or the mode is unknown.
        """
        import swanlab.package
        from swanlab.data.utils import SwanLabMode

        mode, modes = os.environ.get("SWANLAB_MODE", "cloud"), [mode.value for mode in SwanLabMode]
        if mode not in modes:
            raise ConfigError(
                f"trainer.logger='swanlab': SWANLAB_MODE={mode!r} must be one of {', '.join(modes)}",
                code="tracking.swanlab-mode",
            )
        try:
            if mode == "cloud":
                swanlab.package.get_key()
        except swanlab.error.KeyFileError:
            raise ConfigError(
                "trainer.logger='swanlab': there is no login; log in with `swanlab login`, or set SWANLAB_API_KEY, "
                "or SWANLAB_MODE=offline or local",
                code="tracking.no-login",
            ) from None

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        run.folder.mkdir(parents=True, exist_ok=True)
        parameters = inspect.signature(swanlab.init).parameters
        continued = {"id": run.run_id, "resume": "allow"} if "resume" in parameters and run.run_id else {}
        cloud = os.environ.get("SWANLAB_MODE", "cloud") == "cloud"
        self.run = swanlab.init(
            project=run.project,
            experiment_name=run.name,
            config=dict(run.config),
            logdir=str(run.folder / "swanlog"),
            settings=swanlab.Settings(log_proxy_type="none"),  # this process has no output of the run
            **(continued if cloud else {}),
        )
        self._swanlab = swanlab

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log the metrics."""
        self.run.log(dict(metrics), step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log the samples as a table."""
        if samples:
            table = _table(samples)
            self.run.log({"samples": self._swanlab.echarts.Table().add(table["columns"], table["data"])}, step)

    def leftover(self) -> str:
        """Name the command that sends the records later; the package keeps them in files."""
        return f"send the missing records by: swanlab sync {self.run.public.swanlog_dir}/run-*"

    def finish(self) -> None:
        """Send all records and end the experiment."""
        self._swanlab.finish()


@register_tracker("mlflow")
class MlflowTracker(Tracker):
    """An MLflow run, at ``MLFLOW_TRACKING_URI``: a server, or a database such as ``sqlite:///mlflow.db`` (the default).

    A resumed run continues the same run, found by its tag ``megarl.run_id``. Metric names have ``_at_`` instead of
    ``@``, which MLflow rejects. The config is logged as parameters with dotted names and as the artifact
    ``config.json``. Sample tables are the artifacts ``samples/step_<step>.json``.
    """

    in_subprocess = True
    package = "mlflow"

    @classmethod
    def check(cls) -> None:
        """Check that the installed packages support the tracking URI; nothing is connected to, created or written.

        Raises:
            ConfigError: it is a database whose packages are missing, or a folder.
        """
        import mlflow
        from mlflow.store.db.db_types import DATABASE_ENGINES

        uri = mlflow.get_tracking_uri()
        try:
            if uri.partition(":")[0].partition("+")[0] in DATABASE_ENGINES:
                _check_database(uri)
            else:
                mlflow.MlflowClient()  # refuses folders; a server is not contacted
        except (ImportError, ValueError, mlflow.exceptions.MlflowException) as error:
            raise ConfigError(
                f"trainer.logger='mlflow': MLFLOW_TRACKING_URI={uri!r} cannot be used: {error}",
                code="tracking.mlflow-uri",
            ) from error

    def __init__(self, run: RunInfo) -> None:
        # This process is retried by the driver; the package's retries last minutes and look like a hang.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, round(run.timeout_s / 3))))
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self.client = mlflow.MlflowClient()
        experiment = self.client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(run.project)
        runs = self.client.search_runs([experiment_id], f"tags.`{MLFLOW_RUN_TAG}` = '{run.run_id}'", max_results=1)
        if runs:
            self.id = runs[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
        else:
            self.id = self.client.create_run(
                experiment_id, run_name=run.name, tags={MLFLOW_RUN_TAG: run.run_id}
            ).info.run_id
        # MLflow parameters are immutable: a resumed run's changed values are in config.json only.
        logged = self.client.get_run(self.id).data.params
        params = [Param(name, text) for name, text in _flat(run.config) if name not in logged]
        for at in range(0, len(params), MLFLOW_PARAMS_PER_CALL):
            self.client.log_batch(self.id, params=params[at : at + MLFLOW_PARAMS_PER_CALL])
        self.client.log_text(self.id, json.dumps(run.config, indent=2, default=str), "config.json")

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send the metrics with one timestamp."""
        now = int(time.time() * 1000)
        points = [self._metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        for at in range(0, len(points), MLFLOW_METRICS_PER_CALL):
            self.client.log_batch(self.id, metrics=points[at : at + MLFLOW_METRICS_PER_CALL])

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Store the samples as a table: ``{"columns": [...], "data": [[...], ...]}``."""
        if samples:
            text = json.dumps(_table(samples), ensure_ascii=False)
            self.client.log_text(self.id, text, f"samples/step_{step}.json")

    def finish(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.id)


def _check_database(uri: str) -> None:
    """Check the packages of a database, and the folder of an SQLite file; MLflow's client would create its tables.

    Raises:
        ImportError: MLflow's store or the driver is not installed.
        ValueError: the URI is malformed, or the file's folder is not writable.
    """
    import_module("mlflow.store.tracking.sqlalchemy_store")
    import sqlalchemy

    try:
        engine = sqlalchemy.create_engine(uri)  # imports the driver, connects on first use
    except sqlalchemy.exc.ArgumentError as error:
        raise ValueError(str(error)) from error
    file = engine.url.database
    if engine.dialect.name != "sqlite" or file is None or file in ("", ":memory:"):
        return
    if problem := write_error(Path(file).parent):
        raise ValueError(f"its folder cannot be written to ({problem})")


def mlflow_name(name: str) -> str:
    """Convert a metric name for MLflow: ``mean@1`` to ``mean_at_1``, other rejected characters to ``_``."""
    return _NOT_IN_MLFLOW_NAMES.sub("_", name.replace("@", "_at_"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield mlflow_name(f"{prefix}{name}"), str(value)[:MLFLOW_PARAM_CHARACTERS]
