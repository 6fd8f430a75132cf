"""Results of a sweep: one per run, and a table that compares the runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.base.formatting import table_lines
from megarl.base.run_writer import RUN_WRITER
from megarl.tracking.jsonl_files import METRICS_FILE, MetricsRow, read_metrics

SWEEP_FILE, TABLE_FILE = "sweep.json", "sweep.csv"
DEFAULT_METRICS = ("critic/score/mean", "val/loss", "train/loss")
"""Objectives for runs that generate no validation responses: the first one that a run logged."""


@dataclass(frozen=True)
class RunResult:
    """Result of one run in a sweep.

    Attributes:
        value: value of the objective; None if the run failed or has no objective.
    """

    overrides: Mapping[str, str]
    metric: str | None
    value: float | None
    error: str | None
    folder: str


def objective(rows: Sequence[MetricsRow], metric: str | None) -> tuple[str | None, float | None]:
    """Return a run's objective: a metric's name and last value; None without a default metric.

    Args:
        metric: name of the metric; None = the mean over data sources of the last validation, or else the first logged
            metric of :data:`DEFAULT_METRICS`.

    Raises:
        ConfigError: the run did not log the metric, or its last value is not finite.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if metric is None:
        means = [name for name in names if name.startswith("val-core/") and "/mean@" in name]
        last = next((row for row in reversed(rows) if means and means[0] in row), None)
        if last is not None:
            scores = [last[name] for name in means if name in last]
            return _finite(means[0] if len(means) == 1 else "val-core mean", sum(scores) / len(scores))
        metric = next((name for name in DEFAULT_METRICS if name in names), None)
        if metric is None:
            return None, None
    values = [row[metric] for row in rows if metric in row]
    if not values:
        logged = ", ".join(name for name in names if name.startswith(("val-core/", "critic/score/", "val/"))) or "none"
        raise ConfigError(
            f"trainer.sweep_metric={metric}: the run logged no such metric; similar ones: {logged}",
            code="tracking.no-sweep-metric",
        )
    return _finite(metric, values[-1])


def _finite(metric: str, value: float) -> tuple[str, float]:
    if not math.isfinite(value):
        raise ConfigError(f"the run's last {metric} is {value}", code="tracking.sweep-metric-not-finite")
    return metric, value


def result_of(folder: Path, overrides: Sequence[str], metric: str | None, error: str | None) -> RunResult:
    """Compute the result of a finished run from its metrics."""
    values = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    name, value = metric, None
    if error is None:
        try:
            name, value = objective(read_metrics(folder / METRICS_FILE), metric)
        except (ConfigError, ValueError, OSError) as failure:
            error = str(failure)
    return RunResult(values, name, value, error, folder.name)


def best_of(results: Sequence[RunResult], minimize: bool) -> RunResult | None:
    """Return the result with the best value; None if no run has a value."""
    valued = [result for result in results if result.value is not None]
    pick = min if minimize else max
    return pick(valued, key=lambda result: result.value or 0.0, default=None)


def _varied_keys(results: Sequence[RunResult]) -> list[str]:
    """Return the keys whose values differ between runs; all keys of a single run."""
    keys = list(dict.fromkeys(key for result in results for key in result.overrides))
    values = {key: {result.overrides.get(key) for result in results} for key in keys}
    return [key for key in keys if len(values[key]) > 1] or keys


def sweep_table(results: Sequence[RunResult], minimize: bool = False) -> str:
    """Format results as a text table: varied keys, value or error; the best run is marked."""
    keys, best = _varied_keys(results), best_of(results, minimize)
    metric = next((result.metric for result in results if result.value is not None), None) or "result"
    rows = [["run", *keys, metric]]
    for result in results:
        shown = "no value" if result.value is None else f"{result.value:.4g}"
        shown = shown if result.error is None else f"failed: {result.error.splitlines()[0]}"
        mark = " <- best" if result is best and len(results) > 1 else ""
        rows.append([result.folder, *(result.overrides.get(key, "") for key in keys), shown + mark])
    return "\n".join(table_lines(rows))


def save_sweep(folder: Path, results: Sequence[RunResult], minimize: bool = False) -> None:
    """Write ``sweep.json`` and ``sweep.csv`` into the sweep's folder."""
    best = best_of(results, minimize)
    content = {"runs": [asdict(result) for result in results], "best": best.folder if best else None}
    RUN_WRITER.replace(folder / SWEEP_FILE, json.dumps(content, indent=1) + "\n")
    keys, table = _varied_keys(results), io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(["run", *keys, "metric", "value", "error"])
    for result in results:
        values = [result.overrides.get(key, "") for key in keys]
        writer.writerow([result.folder, *values, result.metric or "", result.value, result.error or ""])
    RUN_WRITER.replace(folder / TABLE_FILE, table.getvalue())
