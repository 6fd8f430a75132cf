"""Verdict and findings of runs with known metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import MakeRun

from megarl.ops.report.findings import failure_counts, final_metrics, run_findings, run_verdict
from megarl.ops.report.run_files import RunRecord, read_run


def run(values: dict[str, list[float]], status: str = "finished") -> RunRecord:
    length = max(map(len, values.values()))
    rows = [{"step": n + 1, **{name: v[n] for name, v in values.items() if n < len(v)}} for n in range(length)]
    return RunRecord(Path("run"), "run", rows, status=status)


def levels(values: dict[str, list[float]]) -> list[tuple[str, str]]:
    return [(finding.level, finding.metric) for finding in run_findings(run(values))]


ACCURACY = "val-core/x/reward/mean@1"


def test_verdict_of_a_run(make_run: MakeRun) -> None:
    record = read_run(make_run())
    assert run_verdict(record) == (
        "Finished after step 10. Held-out accuracy rose from 0.250 (step 0) to 0.750 (step 10)."
    )
    falling = run({ACCURACY: [0.5, 0.9, 0.4]}, "ended early")
    assert run_verdict(falling) == (
        "Ended early: the last step on record is 3. "
        "Held-out accuracy fell from 0.500 (step 1) to 0.400 (step 3); its best was 0.900 at step 2."
    )
    assert "not measured on held-out problems" in run_verdict(run({"critic/score/mean": [0.1, 0.2]}, "running"))
    assert "The loss went from 2.000 to 1.000." in run_verdict(run({"train/loss": [2.0, 1.0]}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({ACCURACY: [0.5, 0.9, 0.8]}, [("warn", ACCURACY)]),
        ({ACCURACY: [0.5, 0.9, 0.87]}, []),
        (
            {ACCURACY: [0.5, 0.4], "critic/score/mean": [0.1, *[0.9] * 9]},
            [("bad", "critic/score/mean"), ("warn", ACCURACY)],
        ),
        ({"actor/entropy": [1.0, *[0.09] * 9]}, [("warn", "actor/entropy")]),
        ({"actor/entropy": [1.0, *[0.11] * 9]}, []),
        ({"response_length/clip_ratio": [0.0, *[0.2] * 9]}, [("warn", "response_length/clip_ratio")]),
        ({"training/rollout_probs_diff_mean": [0.03] * 5}, [("warn", "training/rollout_probs_diff_mean")]),
        ({"global_seqlen/balanced_imbalance": [1.3] * 5}, [("warn", "global_seqlen/balanced_imbalance")]),
        ({"critic/vf_explained_var": [-0.5] * 20}, [("warn", "critic/vf_explained_var")]),
        ({"critic/vf_explained_var": [-0.5] * 10}, []),
        ({"actor/pg_clipfrac": [0.5] * 5}, [("warn", "actor/pg_clipfrac")]),
        ({"timing_s/step": [1.0] * 30 + [2.0] * 10}, [("warn", "timing_s/step")]),
        ({"timing_s/step": [1.0] * 40}, []),
        ({"actor/loss": [1.0, float("nan")]}, [("bad", "actor/loss")]),
        ({"rollout/requests_moved": [0.0, 2.0]}, [("warn", "rollout/requests_moved")]),
        ({"rollout/replicas_lost": [0.0, 1.0]}, [("bad", "rollout/replicas_lost")]),
    ],
)
def test_findings_by_metric(values: dict[str, list[float]], expected: list[tuple[str, str]]) -> None:
    assert levels(values) == expected


def test_failures_are_summed() -> None:
    record = run({"reward/failed": [0.0, 2.0, 3.0], "reward/timeouts": [0.0, 0.0, 0.0]})
    assert failure_counts(record.rows) == [("reward/failed", "answers whose reward failed", 5.0, 2)]
    assert run_findings(record)[0].text == "5 answers whose reward failed, in 2 steps."


def test_damaged_file_is_a_finding(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "config.yaml").write_text("a: [")
    (first, *_) = run_findings(read_run(folder))
    assert first.level == "bad" and "config.yaml cannot be read" in first.text


def test_final_metrics_for_comparisons(make_run: MakeRun) -> None:
    numbers = final_metrics(read_run(make_run()))
    assert numbers["accuracy_before"] == 0.25 and numbers["accuracy_best"] == numbers["accuracy_after"] == 0.75
    assert numbers["reward"] == pytest.approx((0.6 + 0.7 + 0.8 + 0.9 + 1.0) / 5), "of the last five steps"
    assert (numbers["steps"], numbers["train_seconds"], numbers["failures"]) == (10.0, 20.0, 1.0)
    assert final_metrics(RunRecord(Path("x"), "x", [])) == {}
