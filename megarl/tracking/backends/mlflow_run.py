"""MLflow."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.errors import ConfigError
from megarl.tracking.tracker import RunInfo, Tracker, register_tracker

RUN_TAG = "megarl.run_id"
METRICS_PER_CALL, PARAMS_PER_CALL = 1000, 100  # the most that a server takes at once
MAX_PARAM = 6000  # characters
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")


@register_tracker("mlflow")
class MlflowTracker(Tracker):
    """An MLflow run, at ``MLFLOW_TRACKING_URI``: a server, or a database such as ``sqlite:///mlflow.db`` (the default).

    A resumed run continues the same run, which is found by its tag ``megarl.run_id``. Names of metrics have ``_at_``
    for ``@``, which MLflow does not allow. The configuration is logged as parameters, with dots in their names, and
    whole as ``config.json``; sample tables are the artifacts ``samples/step_<step>.json``.
    """

    apart = True
    package = "mlflow"

    @classmethod
    def check(cls) -> None:
        """The place must be one that the installed packages can reach.

        Raises:
            ConfigError: it is a database, and the packages for that are missing; or it is a folder.
        """
        import mlflow

        uri = mlflow.get_tracking_uri()
        try:
            mlflow.MlflowClient()  # it opens nothing but a local place
        except (ImportError, mlflow.exceptions.MlflowException) as error:
            raise ConfigError(
                f"trainer.logger='mlflow': MLFLOW_TRACKING_URI={uri!r} cannot be used: {error}"
            ) from error

    def __init__(self, run: RunInfo) -> None:
        # Ours are the retries: the package's own, of many minutes, would look like a hang.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, round(run.timeout_s / 3))))
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self.client = mlflow.MlflowClient()
        experiment = self.client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment else self.client.create_experiment(run.project)
        found = self.client.search_runs([place], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if found:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
        else:
            self.id = self.client.create_run(place, run_name=run.name, tags={RUN_TAG: run.run_id}).info.run_id
        # A parameter cannot be changed: what a resumed run has changed is in its config.json alone.
        known = self.client.get_run(self.id).data.params
        params = [Param(name, text) for name, text in _flat(run.config) if name not in known]
        for at in range(0, len(params), PARAMS_PER_CALL):
            self.client.log_batch(self.id, params=params[at : at + PARAMS_PER_CALL])
        self.client.log_text(self.id, json.dumps(run.config, indent=2, default=str), "config.json")

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send the metrics, all with one time."""
        now = int(time.time() * 1000)
        points = [self._metric(metric_name(name), float(value), now, step) for name, value in metrics.items()]
        for at in range(0, len(points), METRICS_PER_CALL):
            self.client.log_batch(self.id, metrics=points[at : at + METRICS_PER_CALL])

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Store the answers as a table: ``{"columns": [...], "data": [[...], ...]}``."""
        if samples:
            columns = list(samples[0])
            table = {"columns": columns, "data": [[str(sample.get(name)) for name in columns] for sample in samples]}
            text = json.dumps(table, ensure_ascii=False)
            self.client.log_text(self.id, text, f"samples/step_{step}.json")

    def finish(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.id)


def metric_name(name: str) -> str:
    """A metric's name in MLflow: ``mean@1`` as ``mean_at_1``, and ``_`` for what else it does not allow."""
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts of nested values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield metric_name(f"{prefix}{name}"), str(value)[:MAX_PARAM]
