"""``layout=auto`` on a command line: devices found, stored values, resumed layouts, and what helps if nothing fits."""

import json
from pathlib import Path

import pytest
import yaml
from planned_jobs import MODELS
from support.expected_errors import raises

from megarl.base import nvidia_smi
from megarl.base.nvidia_smi import parse_inventory, visible_gpus
from megarl.cli import main
from megarl.config import TrainConfig
from megarl.config.keys import value_at
from megarl.ops.jobs.table import compose_job
from megarl.ops.plan.hardware import gpu_hardware

SMI = Path(__file__).parents[1] / "doctor" / "nvidia_smi.xml"
ACTOR = "actor_rollout_ref.actor.megatron"
TP = f"{ACTOR}.tensor_model_parallel_size"


def words(model, *extra):
    keys = ("data.max_prompt_length=1024", "data.max_response_length=8192", "actor_rollout_ref.rollout.name=sglang")
    return ["--model", str(MODELS / model), "--data", "none.parquet", *keys, *extra]


def test_a_short_command_gets_the_layout_that_the_plan_prints(capsys):
    config = compose_job("grpo", words("Qwen2.5-32B", "trainer.hardware=h100", "trainer.nnodes=2"))
    assert isinstance(config, TrainConfig) and config.layout == "auto"
    assert config.trainer.n_gpus_per_node == 8 and value_at(config, TP) == 4
    assert config.actor_rollout_ref.actor.megatron.data_parallel_size == 4
    keys = [word for word in words("Qwen2.5-32B", "trainer.nnodes=2") if "=" in word]
    path = f"actor_rollout_ref.model.path={MODELS / 'Qwen2.5-32B'}"
    arguments = ["--config-name=grpo", "--hardware=h100", "--json", "layout=auto", path, "data.train_files=none", *keys]
    assert main(["plan", *arguments]) == 0
    out, table = capsys.readouterr()
    assert json.loads(out)["fits"] and f"{TP}=4 " in table


def test_the_configuration_of_a_run_stores_plain_numbers(capsys):
    assert main(["grpo", "--cfg", "job", *words("Qwen2.5-7B", "trainer.hardware=h100")]) == 0
    stored = yaml.safe_load(capsys.readouterr().out)
    megatron = stored["actor_rollout_ref"]["actor"]["megatron"]
    assert (megatron["tensor_model_parallel_size"], megatron["data_parallel_size"]) == (1, 8)
    assert megatron["recompute_granularity"] == "full" and megatron["optimizer_offload"] is True


def test_a_named_configuration_is_manual_and_a_word_wins():
    assert compose_job("train", ["--config-name", "quickstart", "--model", "m"]).layout == "manual"
    assert compose_job("sft", ["--model", "m", "--data", "d", "layout=manual"]).layout == "manual"
    assert compose_job("sft", ["--model", "m", "--data", "d", "trainer.device=cpu"]).trainer.n_gpus_per_node == 1


def test_a_resumed_run_keeps_the_layout_of_its_checkpoint(tmp_path):
    keys = ["trainer.hardware=h100", f"trainer.default_local_dir={tmp_path}"]
    step = tmp_path / "global_step_20"
    step.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n", encoding="utf-8")
    stored = {
        "layout": "auto",
        "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
        "actor_rollout_ref": {"actor": {"megatron": {"tensor_model_parallel_size": 4, "data_parallel_size": 2}}},
    }
    (step / "config.yaml").write_text(yaml.safe_dump(stored), encoding="utf-8")
    assert value_at(compose_job("grpo", words("Qwen2.5-7B", *keys)), TP) == 4
    assert value_at(compose_job("grpo", words("Qwen2.5-7B", *keys, f"{TP}=2")), TP) == 2
    assert value_at(compose_job("grpo", words("Qwen2.5-7B", *keys, "trainer.resume_mode=disable")), TP) == 1
    assert value_at(compose_job("grpo", words("Qwen2.5-7B", *keys, "trainer.nnodes=2")), TP) == 1


def test_an_error_names_the_excess_and_changes_that_fit():
    with raises("layout.nothing-fits", "1 x 8 h100", "GiB", "trainer.nnodes=2", "actor_rollout_ref.model.lora_rank=32"):
        compose_job("grpo", words("Llama-3-70B", "trainer.hardware=h100"))


def test_gpus_have_the_speeds_of_their_kind_and_their_own_memory():
    found = parse_inventory(SMI.read_text(encoding="utf-8")).gpus
    hardware = gpu_hardware(found, 512 * 2**30)
    assert hardware.name == found[0].name and hardware.devices_per_node == len(found)
    assert hardware.memory_gib == pytest.approx(found[0].total_bytes / 2**30, abs=0.1)
    assert hardware.host_memory_gib == 512


def test_hidden_gpus_do_not_count(monkeypatch):
    found = parse_inventory(SMI.read_text(encoding="utf-8")).gpus
    monkeypatch.setattr(nvidia_smi.shutil, "which", lambda name: name)
    monkeypatch.setattr(nvidia_smi, "run_nvidia_smi", lambda *words: SMI.read_text(encoding="utf-8"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == found[1:2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()
