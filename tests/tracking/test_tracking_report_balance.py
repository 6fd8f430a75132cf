"""Maps of ranks over steps; the numbers are added by hand."""

from __future__ import annotations

from report_runs import MakeRun

from megarl.tracking.balance_file import BalanceFile
from megarl.tracking.report.balance import MOST_RANKS, MOST_STEPS, balance_charts, balance_maps
from megarl.tracking.report.charts import chart_groups
from megarl.tracking.report.page import page_data
from megarl.tracking.report.rollouts import Rollouts
from megarl.tracking.report.run_files import read_run


def test_load_is_over_the_mean_of_the_step() -> None:
    rows = {
        1: {"actor/update_actor_s": [1.0, 3.0], "actor/tokens": [100.0, 300.0]},
        3: {"actor/tokens": [50.0, 50.0], "critic/tokens": [9.0]},
    }
    maps = balance_maps(rows)
    assert list(maps) == ["actor/tokens", "actor/update_actor_s"], "what one rank has is no map"
    assert maps["actor/tokens"] == {
        "steps": [1, 3], "ranks": [0, 1], "each": 1, "mean": [200.0, 50.0], "load": [[0.5, 1.0], [1.5, 1.0]],
    }  # fmt: skip
    assert maps["actor/update_actor_s"]["steps"] == [1]
    titles = [(chart["title"], chart["kind"]) for chart in balance_charts(maps)]
    assert titles == [("Ranks of actor: tokens", "ranks"), ("Ranks of actor: busy in update_actor", "ranks")]


def test_steps_before_another_layout_are_left_out() -> None:
    rows = {1: {"actor/tokens": [1.0, 1.0]}, 2: {"actor/tokens": [1.0, 2.0, 3.0]}, 3: {"actor/tokens": [0.0, 0.0, 0.0]}}
    assert balance_maps(rows)["actor/tokens"]["steps"] == [2, 3]
    assert balance_maps(rows)["actor/tokens"]["load"] == [[0.5, 1.0], [1.0, 1.0], [1.5, 1.0]]


def test_a_thousand_ranks_and_steps_fit_and_the_worst_is_seen() -> None:
    rows = {step: {"actor/work": [1.0] * 1000} for step in range(1, 1001)}
    rows[503]["actor/work"][777] = 5.0
    found = balance_maps(rows)["actor/work"]
    assert len(found["steps"]) == MOST_STEPS and found["each"] == 8 and len(found["ranks"]) == 125 <= MOST_RANKS
    row, column = found["ranks"].index(776), found["steps"].index(503)
    assert found["load"][row][column] == round(5 / 1.004, 4) == max(max(loads) for loads in found["load"])


def test_one_run_shows_its_maps_and_a_comparison_none(make_run: MakeRun) -> None:
    folder, other = make_run("a"), make_run("b")
    BalanceFile(folder / "balance.jsonl").add(2, {"actor/tokens": [10, 20, 30]})
    alone = page_data([read_run(folder)], Rollouts([], 0, 0), "a")
    assert alone["runs"][0]["ranks"]["actor/tokens"]["load"] == [[0.5], [1.0], [1.5]]
    assert [group["title"] for group in alone["groups"]].count("Balance") == 1
    both = page_data([read_run(folder), read_run(other)], Rollouts([], 0, 0), "both")
    assert both["runs"][0]["ranks"] == {} and "Balance" not in [group["title"] for group in both["groups"]]
    assert "Balance" not in [group["title"] for group in chart_groups(["critic/score/mean"])]


def test_a_broken_file_is_named_and_the_rest_shown(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "balance.jsonl").write_text('[]\n{"step": 1}\n')
    run = read_run(folder)
    assert run.balance == {} and len(run.rows) == 11
    assert [problem for problem in run.problems if "balance.jsonl, line 1: not a row" in problem]
