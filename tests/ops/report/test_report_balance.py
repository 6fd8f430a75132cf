"""Maps of ranks over steps, with hand-computed numbers."""

from megarl.ops.report.balance import MOST_RANKS, MOST_STEPS, balance_charts, balance_maps
from megarl.ops.report.charts import chart_groups
from megarl.ops.report.page import page_data
from megarl.ops.report.rollouts import ReportRollouts
from megarl.ops.report.run_files import read_run
from megarl.tracking.jsonl_files import BalanceFile


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
    alone = page_data([read_run(folder)], ReportRollouts([], 0, 0), "a")
    assert alone["runs"][0]["ranks"]["actor/tokens"]["load"] == [[0.5], [1.0], [1.5]]
    assert [group["title"] for group in alone["groups"]].count("Balance") == 1
    both = page_data([read_run(folder), read_run(other)], ReportRollouts([], 0, 0), "both")
    assert both["runs"][0]["ranks"] == {} and "Balance" not in [group["title"] for group in both["groups"]]
    assert "Balance" not in [group["title"] for group in chart_groups(["critic/score/mean"])]


def test_broken_balance_file_is_reported(make_run):
    folder = make_run()
    (folder / "balance.jsonl").write_text('[]\n{"step": 1}\n', encoding="utf-8")
    run = read_run(folder)
    assert run.balance == {} and len(run.rows) == 11
    assert [problem for problem in run.problems if "balance.jsonl, line 1: not a row" in problem]
