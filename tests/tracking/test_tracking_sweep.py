"""What runs of a sweep are judged by, and the table of them."""

import csv
import json

import pytest
from support.expected_errors import raises

from megarl.tracking.sweep import RunResult, objective, result_of, save_sweep, sweep_table

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
def test_objective(rows, metric, expected):
    assert objective(rows, metric) == expected


def test_missing_and_non_finite_objectives_are_errors():
    with raises("tracking.no-sweep-metric", "trainer.sweep_metric=critic/score:", "critic/score/mean"):
        objective(VALIDATED, "critic/score")
    with raises("tracking.sweep-metric-not-finite", "critic/score/mean is nan"):
        objective([{"step": 1, "critic/score/mean": float("nan")}], None)


def test_results_are_a_table_and_files(tmp_path):
    results = []
    for number in range(4):
        run = tmp_path / str(number)
        run.mkdir()
        row = {"step": 1, "critic/score/mean": number / 10}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        error = "out of\nmemory" if number == 1 else None
        results.append(result_of(run, [f"+lr={number}", "steps=5"], None, error))
    assert results[2] == RunResult({"lr": "2", "steps": "5"}, "critic/score/mean", 0.2, None, "2")
    lines = sweep_table(results).splitlines()
    assert lines[0].split() == ["run", "lr", "critic/score/mean"]
    assert lines[2].endswith("failed: out of") and lines[4].endswith("0.3 <- best")
    assert "0 <- best" in sweep_table(results, minimize=True).splitlines()[1]
    save_sweep(tmp_path, results)
    saved = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert saved["best"] == "3" and saved["runs"][1]["value"] is None
    with (tmp_path / "sweep.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[2] == {"run": "2", "lr": "2", "metric": "critic/score/mean", "value": "0.2", "error": ""}
    assert rows[1]["value"] == "" and rows[1]["error"] == "out of\nmemory"


def test_table_shows_varied_keys_only():
    two = [RunResult({"lr": str(n), "steps": "5"}, "m", float(n), None, str(n)) for n in (1, 2)]
    assert sweep_table(two).splitlines()[0].split() == ["run", "lr", "m"]
    assert sweep_table(two[:1]).splitlines()[0].split() == ["run", "lr", "steps", "m"]
