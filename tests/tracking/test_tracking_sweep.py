"""What runs of a sweep are judged by, and the table of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from expected_errors import raises

from megarl.tracking.sweep import RunResult, objective, read_results, result_of, save_sweep, sweep_table

VALIDATED = [
    {"step": 0, "val-core/a/reward/mean@1": 0.9, "val-core/b/reward/mean@1": 0.9},
    {"step": 1, "critic/score/mean": 0.7},
    {"step": 2, "critic/score/mean": 0.8, "val-core/a/reward/mean@1": 0.25, "val-core/b/reward/mean@1": 0.5},
    {"step": 3, "critic/score/mean": 0.6, "train/loss": 2.0},
]


@pytest.mark.parametrize(
    ("rows", "metric", "expected"),
    [
        (VALIDATED, None, ("val-core mean", 0.375)),  # the last validation, not the last step
        (VALIDATED[1:2], None, ("critic/score/mean", 0.7)),
        ([{"step": 1, "train/loss": 3.0, "val/loss": 4.0}], None, ("val/loss", 4.0)),
        (VALIDATED, "critic/score/mean", ("critic/score/mean", 0.6)),
        (VALIDATED, "val-core/a/reward/mean@1", ("val-core/a/reward/mean@1", 0.25)),
        ([], None, (None, None)),
    ],
)
def test_objective(rows: list, metric: str | None, expected: tuple) -> None:
    assert objective(rows, metric) == expected


def test_missing_and_non_finite_objectives_are_errors() -> None:
    with raises("tracking.no-sweep-metric", "trainer.sweep_metric=critic/score:", "critic/score/mean"):
        objective(VALIDATED, "critic/score")
    with raises("tracking.sweep-metric-not-finite", "critic/score/mean is nan"):
        objective([{"step": 1, "critic/score/mean": float("nan")}], None)


def started(folder: Path, name: str, *rows: dict) -> Path:
    run = folder / name
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text("[]", encoding="utf-8")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return run


def test_results_are_ordered_and_dead_runs_are_errors(tmp_path: Path) -> None:
    for number in range(11):
        run = started(tmp_path, str(number), {"step": 1, "critic/score/mean": number / 10})
        if number not in (3, 10):
            overrides = [f"+lr={number}", "steps=5"]
            result_of(run, overrides, None, "out of\nmemory" if number == 4 else None)
    (tmp_path / ".submitit").mkdir()
    results = read_results(tmp_path)
    assert [result.folder for result in results] == [str(number) for number in range(11)]
    assert results[2] == RunResult({"lr": "2", "steps": "5"}, "critic/score/mean", 0.2, None, "2")
    assert results[3].error == results[10].error == "the run's process ended without a result"
    lines = sweep_table(results).splitlines()
    assert lines[0].split() == ["run", "lr", "steps", "critic/score/mean"]
    assert lines[5].endswith("failed: out of") and lines[10].endswith("0.9 <- best")
    assert "0 <- best" in sweep_table(results, minimize=True).splitlines()[1]
    save_sweep(tmp_path, results)
    saved = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert saved["best"] == "9" and saved["runs"][4]["value"] is None
    with (tmp_path / "sweep.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[2] == {
        "run": "2", "lr": "2", "steps": "5", "metric": "critic/score/mean", "value": "0.2", "error": ""
    }  # fmt: skip
    assert rows[4]["value"] == "" and rows[4]["error"] == "out of\nmemory"


def test_table_shows_varied_keys_only() -> None:
    two = [RunResult({"lr": str(n), "steps": "5"}, "m", float(n), None, str(n)) for n in (1, 2)]
    assert sweep_table(two).splitlines()[0].split() == ["run", "lr", "m"]
    assert sweep_table(two[:1]).splitlines()[0].split() == ["run", "lr", "steps", "m"]
