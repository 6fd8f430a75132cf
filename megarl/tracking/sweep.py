"""What came of the runs of a sweep: each leaves a file in its folder, and one table compares them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.errors import ConfigError
from megarl.tracking.metrics_file import FILE_NAME, MetricsRow, read_metrics

RESULT_FILE, SWEEP_FILE, TABLE_FILE = "result.json", "sweep.json", "sweep.csv"
DEFAULT_METRICS = ("critic/score/mean", "val/loss", "train/loss")
"""What runs without validation answers are judged by: the first that they have."""


@dataclass(frozen=True)
class RunResult:
    """One run of a sweep.

    Attributes:
        overrides: values of this run by key.
        metric: what it is judged by.
        value: of that; None where the run failed, or had nothing to be judged by.
        error: why it failed; None where it did not.
        folder: of its files, below the sweep's.
    """

    overrides: Mapping[str, str]
    metric: str | None
    value: float | None
    error: str | None
    folder: str = ""


def objective(rows: Sequence[MetricsRow], metric: str | None) -> tuple[str | None, float | None]:
    """What a run is judged by: a metric's name, and its last value; both None where none is named and none is there.

    Args:
        rows: the run's metrics.
        metric: the name; None = the mean over the data sources of the last validation, or where there is none the
            first of :data:`DEFAULT_METRICS` that there is.

    Raises:
        ConfigError: the run has no such metric, or its last value is not finite.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if metric is None:
        means = [name for name in names if name.startswith("val-core/") and "/mean@" in name]
        last = next((row for row in reversed(rows) if means and means[0] in row), None)
        if last is not None:
            found = [last[name] for name in means if name in last]
            return _finite(means[0] if len(means) == 1 else "val-core mean", sum(found) / len(found))
        metric = next((name for name in DEFAULT_METRICS if name in names), None)
        if metric is None:
            return None, None
    values = [row[metric] for row in rows if metric in row]
    if not values:
        told = ", ".join(name for name in names if name.startswith(("val-core/", "critic/score/", "val/"))) or "none"
        raise ConfigError(f"trainer.sweep_metric={metric}: the run logged no such metric; of its kind there are {told}")
    return _finite(metric, values[-1])


def _finite(metric: str, value: float) -> tuple[str, float]:
    if not math.isfinite(value):
        raise ConfigError(f"the run's last {metric} is {value}")
    return metric, value


def result_of(folder: Path, overrides: Sequence[str], metric: str | None, error: str | None) -> RunResult:
    """The result of a run that ended, from its metrics; written into its folder."""
    given = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    name, value = metric, None
    if error is None:
        try:
            name, value = objective(read_metrics(folder / FILE_NAME), metric)
        except (ConfigError, ValueError) as problem:
            error = str(problem)
    result = RunResult(given, name, value, error)
    (folder / RESULT_FILE).write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return result


def read_results(folder: Path) -> list[RunResult]:
    """Results of all runs of a sweep, by their numbers; one that ended without a result has that as its error."""
    runs = [path.parent.parent for path in folder.glob("*/.hydra/overrides.yaml")]
    results = []
    for run in sorted(runs, key=lambda path: (len(path.name), path.name)):
        try:
            values = json.loads((run / RESULT_FILE).read_text(encoding="utf-8"))
            results.append(RunResult(**{**values, "folder": run.name}))
        except (OSError, ValueError, TypeError):
            results.append(RunResult({}, None, None, "the run's process ended without a result", run.name))
    return results


def best_of(results: Sequence[RunResult], minimize: bool) -> RunResult | None:
    """The result with the best value; None where no run has one."""
    valued = [result for result in results if result.value is not None]
    pick = min if minimize else max
    return pick(valued, key=lambda result: result.value or 0.0, default=None)


def varied(results: Sequence[RunResult]) -> list[str]:
    """Keys that do not have the same value in all runs; all keys where there is but one run."""
    keys = list(dict.fromkeys(key for result in results for key in result.overrides))
    values = {key: {result.overrides.get(key) for result in results} for key in keys}
    return [key for key in keys if len(values[key]) > 1] or keys


def sweep_table(results: Sequence[RunResult], minimize: bool = False) -> str:
    """Results as plain text: what varied, the value, and why a run has none; the best is marked."""
    keys, best = varied(results), best_of(results, minimize)
    metric = next((result.metric for result in results if result.value is not None), None) or "result"
    rows = [["run", *keys, metric]]
    for result in results:
        shown = "no value" if result.value is None else f"{result.value:.4g}"
        shown = shown if result.error is None else f"failed: {result.error.splitlines()[0]}"
        mark = " <- best" if result is best and len(results) > 1 else ""
        rows.append([result.folder, *(result.overrides.get(key, "") for key in keys), shown + mark])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def save_sweep(folder: Path, results: Sequence[RunResult], minimize: bool = False) -> None:
    """Writes ``sweep.json`` and ``sweep.csv`` into the sweep's folder."""
    best = best_of(results, minimize)
    values = {"runs": [asdict(result) for result in results], "best": best.folder if best else None}
    (folder / SWEEP_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    keys = varied(results)
    with open(folder / TABLE_FILE, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, "metric", "value", "error"])
        for result in results:
            told = [result.overrides.get(key, "") for key in keys]
            writer.writerow([result.folder, *told, result.metric or "", result.value, result.error or ""])
