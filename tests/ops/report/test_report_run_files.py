"""Search and reading of runs' folders."""

import shlex
import sys

import pytest

from megarl.ops.report import NoRunError, page
from megarl.ops.report.command import main
from megarl.ops.report.run_files import (
    config_rows,
    environment_rows,
    find_runs,
    read_run,
    rerun_command,
    run_description,
)


def test_find_runs_in_sweeps_and_experiments(make_run, tmp_path):
    for number in (0, 2, 10):
        make_run(f"sweep/{number}")
    single = make_run("single")
    (single / "checkpoints" / "global_step_5").mkdir(parents=True)
    (single / "checkpoints" / "global_step_5" / "metrics.jsonl").touch()
    saved = make_run("saves/global_step_5")
    (saved / "trainer_state.json").write_text("{}", encoding="utf-8")
    runs = find_runs([tmp_path / "sweep", single, tmp_path / "sweep" / "2"])
    assert [str(path.relative_to(tmp_path)) for path in runs] == ["sweep/0", "sweep/2", "sweep/10", "single"]
    with pytest.raises(NoRunError, match="saves: no run in it or below it"):
        find_runs([tmp_path / "saves"])
    with pytest.raises(NoRunError, match="nowhere: no such folder"):
        find_runs([tmp_path / "nowhere"])


def test_status_of_an_unfinished_run(make_run):
    folder = make_run(finished=False)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 11, "critic/sc')
    changed = (folder / "metrics.jsonl").stat().st_mtime
    assert read_run(folder, now=changed + 60).status == "running"
    assert read_run(folder, now=changed + 3600).status == "ended early"
    assert len(read_run(folder).rows) == 11, "an incomplete line is not a row"
    slow = make_run("slow", [{"step": n, "timing_s/step": 900.0} for n in range(1, 11)], finished=False)
    changed = (slow / "metrics.jsonl").stat().st_mtime
    assert read_run(slow, now=changed + 3600).status == "running", "its steps are slow"


def test_missing_and_broken_files_are_reported(make_run):
    folder = make_run()
    (folder / "run.json").write_text("[1]", encoding="utf-8")
    (folder / "summary.json").write_text("{", encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2}\n', encoding="utf-8")
    (folder / "config.yaml").unlink()
    run = read_run(folder)
    assert run.config == run.facts == run.summary == {} and run.rows == [] and run.name == "run"
    problems = " ".join(run.problems)
    assert (
        "run.json is not a mapping" in problems and "summary.json cannot be read" in problems and "line 2" in problems
    )


def test_command_line(make_run, tmp_path, capsys, monkeypatch):
    folder = make_run()
    assert main([str(folder)]) == 0 and (folder / "report.html").exists()
    assert capsys.readouterr().out.startswith(f"{folder / 'report.html'} (2.")
    make_run("other")
    assert main([str(folder), str(tmp_path / "other"), "-o", str(tmp_path / "new" / "both.html")]) == 0
    assert (tmp_path / "new" / "both.html").exists()
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    page._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err.endswith("-e '.[report]' [packages.not-installed]\n")


def test_config_rows_with_changed_keys(make_run):
    runs = [read_run(make_run("a")), read_run(make_run("b", lr=0.5, facts=False))]
    rows = {row["key"]: row for row in config_rows(runs)}
    assert rows["optim.lr"]["values"] == ["1e-06", "0.5"] and rows["optim.lr"]["origins"] == ["command line", ""]
    assert rows["optim.lr"]["default"] == "0.001" and rows["optim.on"]["default"] is None
    assert rows["optim.on"]["values"] == ["true", "true"], "as on the command line"
    environment = {row["key"]: row["values"] for row in environment_rows(runs)}
    assert environment["source of megarl"] == ["abc123 (main), with 1 changed files: a.py", None]
    words = shlex.split(environment["command"][0])  # as a shell reads the pasted line
    assert words == ["megarl", "train", "--config-name", "ppo", "optim.lr=1e-06", "trainer.note='a b'"]
    assert environment["torch"] == ["2.13.0", None] and environment["folder"][1] == str(runs[1].folder)
    assert rerun_command({"config_name": "x", "overrides": []}) == "megarl train --config-name x"


def test_run_description(make_run):
    run = read_run(make_run())
    assert run_description(run) == []
    run.config.update(  # type: ignore[attr-defined]
        algorithm={"adv_estimator": "gae", "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.1}},
        critic={"megatron": {"tensor_model_parallel_size": 1, "data_parallel_size": 2}},
        actor_rollout_ref={
            "model": {"path": "qwen"},
            "actor": {"ppo_mini_batch_size": 8, "megatron": {"tensor_model_parallel_size": 4, "data_parallel_size": 2}},
            "rollout": {"name": "sglang", "n": 5, "tensor_model_parallel_size": 2},
        },
        data={"train_batch_size": 16, "train_files": ["a", "b"]},
    )
    description = dict(run_description(run))
    assert description["Algorithm"] == "gae advantages, KL in the reward (0.1)"
    assert description["Each step"] == "16 prompts, 5 answers each, mini-batches of 8 prompts"
    assert (description["Actor"], description["Critic"], description["Rollout"]) == (
        "TP 4 x DP 2",
        "DP 2",
        "sglang engine, TP 2",
    )
    assert description["Data"] == "a, b"


def test_devices_of_the_engines_alone_are_described(make_run):
    run = read_run(make_run())
    machines = {"nnodes": 2, "n_gpus_per_node": 8, "device": "cuda"}
    run.config.update(trainer=machines, actor_rollout_ref={"rollout": {"nnodes": 0}})  # type: ignore[attr-defined]
    assert dict(run_description(run))["Devices"] == "2 x 8 cuda"
    run.config["actor_rollout_ref"]["rollout"] |= {"nnodes": 6, "n_gpus_per_node": 4}
    assert dict(run_description(run))["Devices"] == "2 x 8 cuda, 6 x 4 for the engines alone"
    run.config["critic"] = {"nnodes": 1, "n_gpus_per_node": None}  # type: ignore[index]
    text = "2 x 8 cuda, 6 x 4 for the engines alone, 1 x 8 for the critic alone"
    assert dict(run_description(run))["Devices"] == text
