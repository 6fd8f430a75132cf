"""Downsampled curves, and the charts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.ops.report.charts import (
    MOST_RANKS,
    MOST_STEPS,
    balance_charts,
    balance_maps,
    chart_groups,
    downsample,
    metric_curves,
    non_finite_counts,
    training_seconds,
)
from megarl.ops.report.page import page_data
from megarl.ops.report.rollouts import ReportRollouts
from megarl.ops.report.run_files import read_run
from megarl.tracking.jsonl_files import BalanceFile


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 50))
def test_downsampling_keeps_mean_and_extremes(values, most):
    steps = np.arange(len(values)) * 3
    curve = downsample(steps, np.array(values), most)
    if len(values) <= most:
        assert curve["x"] == steps.tolist() and "low" not in curve
        assert curve["y"] == pytest.approx(values, rel=1e-5)
        return
    assert len(curve["y"]) == len(curve["low"]) == len(curve["high"]) == len(curve["x"]) == most
    assert curve["x"] == sorted(set(curve["x"])) and curve["x"][-1] == steps[-1]
    assert min(curve["low"]) == pytest.approx(min(values), rel=1e-5)
    assert max(curve["high"]) == pytest.approx(max(values), rel=1e-5)
    for low, mean, high in zip(curve["low"], curve["y"], curve["high"], strict=True):
        assert low - 1e-5 * abs(low) - 1e-9 <= mean <= high + 1e-5 * abs(high) + 1e-9


def test_downsampling_by_hand():
    curve = downsample(np.array([1, 2, 3, 4, 5]), np.array([1.0, 3.0, 5.0, 0.0, 4.0]), 2)
    assert curve == {"x": [2, 5], "y": [2.0, 3.0], "low": [1.0, 0.0], "high": [3.0, 5.0], "n": 5}


def test_curves_skip_missing_values_and_share_step_axes():
    rows = [{"step": 1, "a": 1.23456789, "b": 2.0}, {"step": 5, "a": 2.0, "b": math.inf, "c": math.nan}]
    axes, curves = metric_curves(rows)
    assert axes == [[1, 5], [1], []]
    assert curves["a"] == {"x": 0, "y": [1.23457, 2.0], "n": 2}
    assert curves["b"] == {"x": 1, "y": [2.0], "n": 1} and curves["c"] == {"x": 2, "y": [], "n": 0}
    assert non_finite_counts(rows) == {"b": 1, "c": 1}
    assert metric_curves([]) == ([], {})


def test_training_time_includes_validation_and_saves():
    rows = [
        {"step": 0, "timing_s/testing": 4.0},
        {"step": 1, "timing_s/step": 2.0, "timing_s/gen": 1.0},
        {"step": 2, "timing_s/step": 2.0, "timing_s/testing": 4.0, "timing_s/save_checkpoint": 1.0},
        {"step": 3, "timing_s/step": math.nan},
    ]
    assert training_seconds(rows) == ([0, 1, 2, 3], [4.0, 6.0, 13.0, 13.0])
    assert training_seconds([]) == ([], [])
    steps, seconds = training_seconds([{"step": step, "timing_s/step": 2.0} for step in range(1, 10_001)])
    assert len(steps) <= 1200 and (steps[0], steps[-1]) == (1, 10_000) and seconds[-1] == 20_000.0


def test_charts_of_the_present_metrics():
    names = [
        "actor/kl_loss", "critic/score/mean", "other/thing", "timing_s/adv", "timing_s/gen", "timing_s/save_checkpoint",
        "timing_s/step", "timing_s/zzz", "val-core/arithmetic/reward/mean@1", "reward/failed",
        "actor/expert_load/dead", "actor/expert_load/max_over_mean/layer_0", "actor/expert_load/max_over_mean/layer_1",
    ]  # fmt: skip
    groups = {group["title"]: {chart["title"]: chart for chart in group["charts"]} for group in chart_groups(names)}
    assert {title: list(charts) for title, charts in groups.items()} == {
        "Learning": ["Reward", "Held-out accuracy", "KL"],
        "Time": ["Time per phase"],
        "Experts": ["Dead experts", "Busiest expert of each layer"],
        "Failures": ["Failures"],
    }
    assert groups["Learning"]["Held-out accuracy"]["series"] == [
        {"metric": "val-core/arithmetic/reward/mean@1", "label": "arithmetic reward mean@1"}
    ]
    assert groups["Learning"]["Held-out accuracy"]["share"] and not groups["Learning"]["KL"]["share"]
    phases = [series["label"] for series in groups["Time"]["Time per phase"]["series"]]
    assert phases == ["gen", "adv", "save_checkpoint", "zzz"], "in the order of the step; the step itself is their sum"


def test_load_is_relative_to_the_mean_of_the_step():
    rows = {
        1: {"actor/update_actor_s": [1.0, 3.0], "actor/tokens": [100.0, 300.0]},
        3: {"actor/tokens": [50.0, 50.0], "critic/tokens": [9.0]},
    }
    maps = balance_maps(rows)
    assert list(maps) == ["actor/tokens", "actor/update_actor_s"], "a single rank has no map"
    assert maps["actor/tokens"] == {
        "steps": [1, 3], "ranks": [0, 1], "each": 1, "mean": [200.0, 50.0], "load": [[0.5, 1.0], [1.5, 1.0]],
    }  # fmt: skip
    assert maps["actor/update_actor_s"]["steps"] == [1]
    titles = [(chart["title"], chart["kind"]) for chart in balance_charts(maps)]
    assert titles == [("Ranks of actor: tokens", "ranks"), ("Ranks of actor: busy in update_actor", "ranks")]


def test_steps_of_an_earlier_layout_are_dropped():
    rows = {1: {"actor/tokens": [1.0, 1.0]}, 2: {"actor/tokens": [1.0, 2.0, 3.0]}, 3: {"actor/tokens": [0.0, 0.0, 0.0]}}
    assert balance_maps(rows)["actor/tokens"]["steps"] == [2, 3]
    assert balance_maps(rows)["actor/tokens"]["load"] == [[0.5, 1.0], [1.0, 1.0], [1.5, 1.0]]


def test_downsampled_map_keeps_the_busiest_rank():
    rows = {step: {"actor/work": [1.0] * 1000} for step in range(1, 1001)}
    rows[503]["actor/work"][777] = 5.0
    load_map = balance_maps(rows)["actor/work"]
    assert (
        len(load_map["steps"]) == MOST_STEPS and load_map["each"] == 8 and len(load_map["ranks"]) == 125 <= MOST_RANKS
    )
    row, column = load_map["ranks"].index(776), load_map["steps"].index(503)
    assert load_map["load"][row][column] == round(5 / 1.004, 4) == max(max(loads) for loads in load_map["load"])


def test_maps_are_shown_for_a_single_run_only(make_run):
    folder, other = make_run("a"), make_run("b")
    BalanceFile(folder / "balance.jsonl").add(2, {"actor/tokens": [10, 20, 30]})
    alone = page_data([read_run(folder)], ReportRollouts([], 0, 0, {}), "a")
    assert alone["runs"][0]["ranks"]["actor/tokens"]["load"] == [[0.5], [1.0], [1.5]]
    assert [group["title"] for group in alone["groups"]].count("Balance") == 1
    both = page_data([read_run(folder), read_run(other)], ReportRollouts([], 0, 0, {}), "both")
    assert both["runs"][0]["ranks"] == {} and "Balance" not in [group["title"] for group in both["groups"]]
    assert "Balance" not in [group["title"] for group in chart_groups(["critic/score/mean"])]


def test_broken_balance_file_is_reported(make_run):
    folder = make_run()
    (folder / "balance.jsonl").write_text('[]\n{"step": 1}\n', encoding="utf-8")
    run = read_run(folder)
    assert run.balance == {} and len(run.rows) == 11
    assert [problem for problem in run.problems if "balance.jsonl, line 1: not a row" in problem]
