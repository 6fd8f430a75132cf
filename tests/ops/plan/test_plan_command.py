"""The command line of ``megarl plan``: reports, exit codes, error messages."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import yaml
from planned_jobs import MODELS, megatron, train_config
from support.expected_errors import raises

from megarl.cli import main
from megarl.config import PreferenceConfig, TrainConfig
from megarl.config.build import build
from megarl.config.compose import ConfigRequest, compose
from megarl.ops.plan.command import fit, measured_run
from megarl.ops.plan.estimate import estimate
from megarl.ops.plan.flops import Lengths
from megarl.ops.plan.hardware import FOLDER, read_hardware

LLAMA = [
    "--config-name=grpo",
    f"actor_rollout_ref.model.path={MODELS / 'Llama-3-70B'}",
    "data.train_files=none",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
    "trainer.nnodes=4",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4",
]
FULL = "actor_rollout_ref.actor.megatron.recompute_granularity=full"


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_report_of_a_plan_that_fits(capsys):
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware", "h200", "--lengths", "200,300")
    assert code == 0
    parts = ["4 x 8 h200", "TP8 PP4 DP1", "responses of 300 (--lengths)", "update_actor", "host memory of a node"]
    parts += ["One training step: 1024 prompts x 8 samples", "FLOPs", "between nodes", "It fits"]
    for part in parts:
        assert part in text
    assert "tokens per second" not in text and "Seconds of a step" not in text, "only with calibrated hardware"


def test_a_plan_that_does_not_fit_suggests_a_change(capsys):
    code, text, _ = run(capsys, *LLAMA, "--hardware=a100")
    assert code == 1 and "It does not fit" in text
    line = next(line for line in text.splitlines() if "it would fit with" in line)
    code, text, _ = run(capsys, *LLAMA, *line.rpartition(": ")[2].split(), "--hardware=a100")
    assert code == 0 and "It fits" in text


def test_json_report(capsys):
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware", "h200", "--json")
    plan = json.loads(text)
    assert code == 0 and plan["fits"] is True and plan["remedy"] is None
    assert (
        set(plan["step"]["phases"])
        == {"gen", "old_log_prob", "ref", "update_actor", "update_weights"}
        == set(plan["memory"])
    )
    for phase in plan["step"]["phases"].values():
        assert sum(phase["shares_of_cost"].values()) == pytest.approx(1) and "seconds" not in phase
    assert plan["step"].keys() == {"phases"}
    for phase in plan["memory"].values():
        assert sum(part["nbytes"] for part in phase["components"]) == phase["bytes"] <= plan["usable_bytes"]
    assert plan["sync"]["total"] == 4 * 2 * (70_553_706_496 + 7 * 161 * 8192), "norms are on each rank"


ASYNC = (
    "--config-name=run_32b_async",
    f"actor_rollout_ref.model.path={MODELS / 'Qwen2.5-32B'}",
    "data.train_files=none",
    "--hardware=h100",
    "--lengths=300,6000",
)


def calibrated_file(tmp_path, **efficiencies):
    text = (FOLDER / "h100.yaml").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(f"{text}efficiencies: {json.dumps(efficiencies)}\n", encoding="utf-8")
    return f"--hardware={tmp_path}/mine.yaml"


def test_asynchronous_training_is_planned_with_its_two_pools(capsys, tmp_path):
    code, text, _ = run(capsys, *ASYNC)
    assert code == 0 and "4 x 8 h100, 4 x 8 for the engines" in text and "Work of a step" in text
    phases = json.loads(run(capsys, *ASYNC, "--json")[1])["step"]["phases"]
    node = calibrated_file(tmp_path, **dict.fromkeys(phases, 0.4))
    text = run(capsys, *ASYNC[:-2], ASYNC[-1], node)[1]
    assert "a step takes at least" in text and "Seconds of a step" in text


def test_calibrated_hardware_gives_seconds_and_an_incomplete_one_does_not(capsys, tmp_path):
    phases = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
    arguments = [*LLAMA, FULL, "trainer.nnodes=8", "--json"]
    step = {
        name: json.loads(run(capsys, *arguments, calibrated_file(tmp_path, **shares))[1])["step"]
        for name, shares in {
            "half": dict.fromkeys(phases, 0.5),
            "quarter": dict.fromkeys(phases, 0.25),
            "partial": dict.fromkeys(phases[1:], 0.5),
        }.items()
    }
    assert step["quarter"]["seconds"] == pytest.approx(2 * step["half"]["seconds"])
    assert step["half"]["seconds"] == pytest.approx(sum(p["seconds"] for p in step["half"]["phases"].values()))
    update = step["half"]["phases"]["update_actor"]
    assert update["mfu"] == pytest.approx(update["flops"] / (update["seconds"] * 64 * 989e12)) and update["mfu"] < 0.5
    assert "seconds" not in step["partial"]


def test_layout_search_of_asynchronous_training_is_refused(capsys):
    code, _, error = run(capsys, *ASYNC, "--search")
    assert code == 2 and "async_training.mode=disaggregated" in error and "[plan.search-async]" in error


def test_layout_search_of_a_command_whose_layout_does_not_divide(capsys):
    invalid = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"
    arguments = [*LLAMA, FULL, invalid, "--hardware=h200"]
    code, _, error = run(capsys, *arguments)
    assert code == 2 and invalid in error
    code, text, _ = run(capsys, *arguments, "--search", "--top=1", "--json")
    assert code == 0
    code, text, _ = run(capsys, *arguments, *json.loads(text)["best"][0]["overrides"])
    assert code == 0 and "It fits" in text


def test_layout_search(capsys):
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware=h200", "--search", "--top=2", "--json")
    best = json.loads(text)["best"]
    assert code == 0 and len(best) == 2
    assert best[0]["relative_cost"] == 1 <= best[1]["relative_cost"] and "seconds" not in best[0]
    code, text, _ = run(capsys, *LLAMA, FULL, "--hardware=h200", "--search", "--top=2")
    assert code == 0 and f"1: {' '.join(best[0]['overrides'])}" in text


@pytest.mark.parametrize("job", ["sft", "reward-model"])
def test_supervised_jobs(capsys, job):
    code, text, _ = run(
        capsys, "--job", job, f"model.path={MODELS / 'Qwen2.5-7B'}", "data.train_files=none", "--json",
        "megatron.tensor_model_parallel_size=2", "megatron.recompute_granularity=full",
    )  # fmt: skip
    plan = json.loads(text)
    assert code == 0 and list(plan["memory"]) == ["update"] == list(plan["step"]["phases"])
    assert plan["sync"] is None and plan["kv_cache"] is None
    assert (plan["lengths"]["prompt"], plan["lengths"]["response"]) == (0, 1024), "rows have no separate prompt"


def test_a_cpu_job_is_planned_for_the_cpu(capsys):
    code, text, _ = run(
        capsys, "--config-name=quickstart", f"actor_rollout_ref.model.path={MODELS / 'Qwen2.5-7B'}", "--json"
    )
    plan = json.loads(text)
    assert plan["hardware"] == "cpu" and code == 1, "7B in float32 with Adam do not fit a laptop"


@pytest.mark.parametrize(
    ("argument", "named", "end"),
    [
        ("--hardware=h10", "--hardware=h10", "[plan.no-hardware-file]"),
        ("trainer.hardware=H200", "did you mean h200?", "[plan.no-hardware-file]"),
        ("--hardware=my/node.yaml", "my/node.yaml", "[plan.no-hardware-file]"),
        ("--lengths=9999", "--lengths=9999", "[plan.lengths]"),
        ("trainer.n_gpus_per_node=16", "trainer.hardware=h100", "[plan.devices-per-node]"),
        ("trainer.nodes=2", "trainer.nnodes", "[config.unknown-key]"),
        ("actor_rollout_ref.model.path=/nowhere", "/nowhere", "[model.folder-missing]"),
        (
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3",
            "pipeline_model_parallel_size=3",
            "[layout.replicas-do-not-divide]",
        ),
    ],
)
def test_errors_have_exit_code_two(capsys, argument, named, end):
    code, _, error = run(capsys, *LLAMA, argument)
    assert code == 2 and named in error and end in error


@pytest.mark.parametrize("arguments", [["--top=3"], ["--search", "--top=0"]])
def test_top_is_a_positive_number_of_a_search(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *LLAMA, *arguments])
    assert stopped.value.code == 2 and "--top needs --search" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["trainer.nnodes=2", "--search"])
def test_a_calibration_takes_no_configuration(capsys, argument):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--calibrate", "run", "--out=x", argument])
    assert stopped.value.code == 2 and "--calibrate" in capsys.readouterr().err


def test_tables_wrap_without_losing_components(capsys):
    """A 70B model on one node, which has many components in every phase."""
    large = ["--config-name=ppo", *LLAMA[1:3], "--hardware=h100"]
    _, text, _ = run(capsys, *large)
    _, values, _ = run(capsys, *large, "--json")
    table = text[text.index("Memory of the fullest") : text.index("Batches")].splitlines()
    assert max(map(len, table)) <= 120
    words = " ".join(" ".join(table).split())
    for part in json.loads(values)["memory"]["update_critic"]["components"]:
        if part["nbytes"] > 2**30:
            assert f"{part['owner']} {part['name']} {part['nbytes'] / 2**30:.1f}" in words


def test_the_planner_imports_no_torch():
    """The planner starts in seconds, since it imports nothing heavy."""
    script = (
        "import sys; from megarl.cli import main\n"
        f"code = main(['plan', '--hardware=h200', {FULL!r}, *{LLAMA!r}])\n"
        "assert code == 0\n"
        "print(*({'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


H100 = read_hardware("h100")
REACHED = {"gen": 0.2, "old_log_prob": 0.4, "update_actor": 0.5, "update_weights": 0.1}
LENGTHS = {"prompt_length/mean": 300.0, "response_length/mean": 500.0, "response_length/max": 1000.0}


def write_run(folder, config, rows, job="train"):
    """Write the files of a run; each row has the metrics of a step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"job": job}), encoding="utf-8")
    lines = [json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def measured(config, reached, lengths=LENGTHS):
    """Return the metrics of a step whose phases reach these fractions of the peak speeds."""
    plan = estimate(config, H100, Lengths(*lengths.values(), "test"))
    seconds = {f"timing_s/{cost.phase}": cost.cost.total / reached[cost.phase] for cost in plan.step.phases}
    return {**seconds, **lengths, "timing_s/step": sum(seconds.values())}


def test_efficiencies_of_runs_predict_the_seconds_of_another_layout(tmp_path, capsys):
    """Two runs 20 % around the true speed, each with a slow first step and one slow step of three."""
    configs = [train_config("Qwen2.5-7B", megatron(tp)) for tp in (1, 2)]
    for number, (config, factor) in enumerate(zip(configs, (0.8, 1.25), strict=True)):
        steady = measured(config, {phase: factor * share for phase, share in REACHED.items()})
        slow = {name: 5 * value if name.startswith("timing_s/") else value for name, value in steady.items()}
        write_run(tmp_path / f"run{number}", config, [slow, slow, steady, steady])
    out = tmp_path / "mine.yaml"
    assert main(["plan", "--calibrate", str(tmp_path), "--hardware=h100", f"--out={out}"]) == 0
    assert "1.56" in capsys.readouterr().out, "the spread"
    node = read_hardware(str(out))
    assert node.efficiencies == pytest.approx(REACHED) and node.links == H100.links
    other = train_config("Qwen2.5-7B", megatron(2, 2), data__train_batch_size=128)
    step = estimate(other, node, Lengths(*LENGTHS.values(), "test")).step
    expected = measured(other, REACHED)
    assert step.is_calibrated and step.total == pytest.approx(expected["timing_s/step"])
    for cost in step.phases:
        assert cost.cost.total == pytest.approx(expected[f"timing_s/{cost.phase}"])


def test_one_timer_of_a_supervised_job_covers_its_passes(tmp_path):
    values = {
        "data": {"train_files": ["x"], "train_batch_size": 32, "max_length": 1000, "max_token_len_per_gpu": 2000},
        "model": {"path": str(MODELS / "Qwen2.5-7B")},
        "loss": {"type": "dpo"},
        "trainer": {"experiment_name": "planned", "n_gpus_per_node": 8, "device": "cuda"},
    }
    config = build(PreferenceConfig, values)
    row = {"timing_s/step": 3.0, "timing_s/update": 2.0, "perf/total_num_tokens": 2 * 32 * 600.0}
    run = measured_run(write_run(tmp_path / "run", config, [row, row], "dpo"))
    assert run.plan.lengths[:2] == (0, 600) and run.seconds.keys() == {"ref", "update"}
    assert sum(run.seconds.values()) == pytest.approx(2.0)
    shares = fit([run]).hardware.efficiencies
    assert shares["ref"] == pytest.approx(shares["update"])


def test_runs_that_cannot_calibrate_are_rejected(tmp_path):
    config = train_config("Qwen2.5-7B")
    row = measured(config, REACHED)
    with raises("plan.calibrate-steps", "metrics.jsonl"):
        measured_run(write_run(tmp_path / "short", config, [row]))
    path = f"actor_rollout_ref.model.path={MODELS / 'Qwen2.5-32B'}"
    asynchronous = compose(ConfigRequest(TrainConfig, "run_32b_async", (path, "data.train_files=none")))
    with raises("plan.calibrate-async", "async_training.mode=disaggregated"):
        measured_run(write_run(tmp_path / "apart", asynchronous, [row, row]))
    (tmp_path / "empty").mkdir()
    with raises("plan.calibrate-folder", str(tmp_path / "empty")):
        measured_run(tmp_path / "empty")
    assert main(["plan", "--calibrate", str(tmp_path / "none")]) == 2
    runs = [
        measured_run(write_run(tmp_path / name, train_config("Qwen2.5-7B", trainer__hardware=name), [row, row]))
        for name in ("h100", "a100")
    ]
    with raises("plan.calibrate-hardware", "a100, h100"):
        fit(runs)
