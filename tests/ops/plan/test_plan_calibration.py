"""Calibration: efficiencies are recovered from run folders with known speeds, and predict other layouts."""

import json
from dataclasses import asdict

import pytest
import yaml
from planned_jobs import MODELS, megatron, train_config
from support.expected_errors import raises

from megarl.cli import main
from megarl.config import PreferenceConfig, TrainConfig
from megarl.config.build import build
from megarl.config.compose import ConfigRequest, compose
from megarl.ops.plan.calibration import fit, measured_run
from megarl.ops.plan.estimate import estimate
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.lengths import Lengths

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
