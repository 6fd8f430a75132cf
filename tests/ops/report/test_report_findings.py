"""Verdict and findings of runs with known metrics."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.ops.report.findings import RULES, failure_counts, final_metrics, run_findings, run_verdict
from megarl.ops.report.run_files import RunRecord, read_run


def run(values, status="finished", config=None):
    length = max(map(len, values.values()))
    rows = [{"step": n + 1, **{name: v[n] for name, v in values.items() if n < len(v)}} for n in range(length)]
    return RunRecord(Path("run"), "run", rows, config or {}, status=status)


def levels(values):
    return [(finding.level, finding.metric) for finding in run_findings(run(values))]


ACCURACY = "val-core/x/reward/mean@1"


def test_verdict_of_a_run(make_run):
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
        ({"actor/entropy": [0.215 - 0.178 * n / 39 for n in range(40)]}, [("warn", "actor/entropy")]),
        ({"actor/entropy": [1.0, *[0.26] * 9]}, []),
        ({"actor/entropy": [1.0, *[0.01] * 4]}, []),  # too short
        ({"actor/entropy": [-1.0, *[-2.0] * 9]}, []),  # of a start below zero there is no share
        ({"response/truncated_ratio": [0.0, *[0.2] * 9]}, [("warn", "response/truncated_ratio")]),
        ({"training/rollout_mismatch_excess": [1.2]}, [("warn", "training/rollout_mismatch_excess")]),
        ({"training/rollout_mismatch_excess": [0.8]}, []),
        ({"training/rollout_probs_diff_mean": [0.03] * 5}, [("warn", "training/rollout_probs_diff_mean")]),
        ({"global_seqlen/balanced_imbalance": [1.3] * 5}, [("warn", "global_seqlen/balanced_imbalance")]),
        ({"critic/vf_explained_var": [-0.5] * 20}, [("warn", "critic/vf_explained_var")]),
        ({"critic/vf_explained_var": [-0.5] * 10}, []),
        ({"critic/vf_explained_var": [0.01] * 40}, [("warn", "critic/vf_explained_var")]),
        ({"critic/vf_explained_var": [0.01] * 30 + [0.3] * 10}, []),
        ({"critic/vf_explained_var": [0.01] * 39 + [0.9]}, [("warn", "critic/vf_explained_var")]),
        ({"actor/ppo_kl": [0.2] * 5}, [("warn", "actor/ppo_kl")]),
        ({"actor/ppo_kl": [0.2] + [0.001] * 5}, []),
        ({"actor/reward_kl_penalty": [1.5] * 5}, [("warn", "actor/reward_kl_penalty")]),
        ({"actor/kl_loss": [1.5] * 5}, [("warn", "actor/kl_loss")]),
        ({"filter_groups/efficiency": [0.1] * 5}, [("warn", "filter_groups/efficiency")]),
        ({"train/skipped_steps": [0.0, 1.0]}, [("bad", "train/skipped_steps")]),
        (
            {"critic/score/max": [1.0, *[0.0] * 5], "critic/score/min": [0.0] * 6},
            [("warn", "critic/score/mean")],
        ),
        ({"critic/score/max": [0.0] * 5 + [1.0], "critic/score/min": [0.0] * 6}, []),
        ({"actor/pg_clipfrac": [0.5] * 5}, [("warn", "actor/pg_clipfrac")]),
        ({"timing_s/step": [1.0] * 30 + [2.0] * 10}, [("warn", "timing_s/step")]),
        ({"timing_s/step": [1.0] * 40}, []),
        ({"actor/loss": [1.0, float("nan")]}, [("bad", "actor/loss")]),
        ({"rollout/requests_moved": [0.0, 2.0]}, [("warn", "rollout/requests_moved")]),
        ({"actor/out_of_memory": [2.0, 0.0]}, [("warn", "actor/out_of_memory")]),
        ({"rollout/replicas_lost": [0.0, 1.0]}, [("bad", "rollout/replicas_lost")]),
    ],
)
def test_findings_by_metric(values, expected):
    assert levels(values) == expected


def test_critic_is_judged_after_its_warmup():
    values = {"critic/vf_explained_var": [0.0] * 10 + [0.02] * 19}
    warmup = {"trainer": {"critic_warmup": 10}}
    assert run_findings(run(values, config=warmup)) == [], "19 steps after the warm-up are too few"
    values["critic/vf_explained_var"].append(0.02)
    (finding,) = run_findings(run(values, config=warmup))
    assert "no variance of the returns: 0.02" in finding.text and "critic.optim.lr" in finding.reason


@pytest.mark.parametrize(("estimator", "count"), [("grpo", 1), ("rloo", 1), ("gae", 0), ("reinforce_plus_plus", 0)])
def test_zero_variance_groups_matter_to_group_estimators(estimator, count):
    values = {"critic/score/zero_variance_fraction": [0.2] * 10 + [0.8] * 5}
    findings = run_findings(run(values, config={"algorithm": {"adv_estimator": estimator}}))
    assert len(findings) == count
    assert [finding.text for finding in findings] == ["All answers score the same in 80% of the groups."] * count


def test_healthy_run_has_no_findings():
    """Fifty steps of GAE and of GRPO: reward and accuracy rise, entropy falls to half, KL grows slowly."""
    steps = range(50)
    values = {
        ACCURACY: [0.2 + n / 100 for n in steps],
        "critic/score/mean": [0.2 + n / 100 for n in steps],
        "critic/score/max": [1.0 for _ in steps],
        "critic/score/min": [0.0 for _ in steps],
        "critic/score/zero_variance_fraction": [0.4 - 0.1 * (n % 2) for n in steps],
        "actor/entropy": [0.6 - 0.3 * n / 49 for n in steps],
        "actor/pg_clipfrac": [0.02 for _ in steps],
        "actor/ppo_kl": [0.002 * (-1) ** n for n in steps],
        "actor/reward_kl_penalty": [0.004 * n for n in steps],
        "actor/skipped_steps": [0.0 for _ in steps],
        "response/truncated_ratio": [0.03 for _ in steps],
        "training/rollout_probs_diff_mean": [0.004 for _ in steps],
        "global_seqlen/balanced_imbalance": [1.02 for _ in steps],
        "timing_s/step": [2.0 + 0.3 * (n % 3) for n in steps],
    }
    assert run_findings(run(values, config={"algorithm": {"adv_estimator": "grpo"}})) == []
    critic = {
        "critic/vf_explained_var": [min(0.7, n / 30) for n in steps],
        "critic/skipped_steps": [0.0 for _ in steps],
    }
    assert run_findings(run({**values, **critic}, config={"algorithm": {"adv_estimator": "gae"}})) == []


def test_page_of_the_report_lists_each_rule_with_its_threshold():
    text = (Path(__file__).resolve().parents[3] / "docs" / "how_to" / "report.md").read_text(encoding="utf-8")
    for rule in RULES:
        limit = f"above {rule.above:g}" if rule.above < math.inf else f"below {rule.below:g}"
        begin = f"| {rule.name} | `{rule.metric}` | {limit}"
        assert any(line.startswith((f"{begin} ", f"{begin},")) for line in text.splitlines()), begin


def test_failures_are_summed():
    record = run({"reward/failed": [0.0, 2.0, 3.0], "reward/timeouts": [0.0, 0.0, 0.0]})
    assert failure_counts(record.rows) == [("reward/failed", "answers whose reward failed", 5.0, 2)]
    assert run_findings(record)[0].text == "5 answers whose reward failed, in 2 steps."


def test_damaged_file_is_a_finding(make_run):
    folder = make_run()
    (folder / "config.yaml").write_text("a: [", encoding="utf-8")
    (first, *_) = run_findings(read_run(folder))
    assert first.level == "bad" and "config.yaml cannot be read" in first.text


def test_final_metrics_for_comparisons(make_run):
    numbers = final_metrics(read_run(make_run()))
    assert numbers["accuracy_before"] == 0.25 and numbers["accuracy_best"] == numbers["accuracy_after"] == 0.75
    assert numbers["reward"] == pytest.approx((0.6 + 0.7 + 0.8 + 0.9 + 1.0) / 5), "of the last five steps"
    assert (numbers["steps"], numbers["train_seconds"], numbers["failures"]) == (10.0, 20.0, 1.0)
    assert final_metrics(RunRecord(Path("x"), "x", [])) == {}


def test_a_slow_host_is_named_with_its_cost():
    record = run({"timing_s/step": [10.0] * 10})
    slow = {step: {"actor/work": [1.0, 1.0], "delay_s/10.0.0.2": [6.0]} for step in range(3, 11)}
    balance = {1: {"actor/work": [1.0, 1.0]}, 2: {"delay_s/10.0.0.1": [2.0]}, **slow}
    [finding] = run_findings(replace(record, balance=balance))
    assert finding.level == "warn" and "10.0.0.2" in finding.text and "48%" in finding.text
    assert "8 of 10 steps" in finding.text
