"""Chosen layouts fit and pass all checks; smaller model parallelism does not fit, and values set by hand stay."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from planned_jobs import MODELS, draft, megatron, train_config
from support.expected_errors import raises

from megarl.base import nvidia_smi
from megarl.base.nvidia_smi import parse_inventory, visible_gpus
from megarl.cli import main
from megarl.config import PreferenceConfig, SFTConfig, TrainConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.config.keys import value_at
from megarl.config.problems import format_value
from megarl.ops.jobs.table import compose_job
from megarl.ops.plan.estimate import shortfalls, usable_bytes
from megarl.ops.plan.hardware import gpu_hardware, read_hardware
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.layout_choice import NothingFitsError, choose_layout
from megarl.ops.plan.layouts import initial_changes, layouts
from megarl.ops.plan.memory import plan_memory

ACTOR = "actor_rollout_ref.actor.megatron"
TP, PP, EP = (f"{ACTOR}.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model"))
LENGTHS = ("data.max_prompt_length=1024", "data.max_response_length=8192")


def request(schema, name, model, *extra):
    path = "actor_rollout_ref.model.path" if schema is TrainConfig else "model.path"
    engine = ("actor_rollout_ref.rollout.name=sglang",) if schema is TrainConfig else ()
    return ConfigRequest(schema, name, ("data.train_files=none", f"{path}={MODELS / model}", *engine, *extra))


def chosen(requested, fixed=(), hardware="h100"):
    keys = {"trainer.nnodes", "trainer.n_gpus_per_node", *fixed}
    return choose_layout(draft(requested), keys, read_hardware(hardware))


def applied(requested, layout):
    """Return the checked configuration with a chosen layout."""
    overrides = (*requested.overrides, *(f"{key}={format_value(value)}" for key, value in layout.changes.items()))
    return compose(replace(requested, overrides=overrides))


def lacking(config, hardware):
    job = planned_job(config, device=hardware.device)
    return shortfalls(job, plan_memory(job, int(usable_bytes(job, hardware)), hardware.devices_per_node), hardware)


@pytest.mark.parametrize(
    ("name", "model", "nodes", "parallel", "smaller"),
    [
        ("grpo", "Qwen2.5-7B", 1, {TP: 1, PP: 1}, []),
        ("grpo", "Qwen2.5-32B", 2, {TP: 4, PP: 1}, [(2, 1), (1, 2)]),
        ("ppo", "Llama-3-70B", 16, {TP: 8, PP: 1}, [(4, 1), (2, 2), (1, 4)]),
        ("grpo", "Qwen3-30B-A3B", 1, {TP: 1, PP: 1, EP: 8}, []),
        pytest.param(
            *("grpo", "DeepSeek-V3", 32, {TP: 2, PP: 16, EP: 8}, [(8, 2), (4, 4)]),
            marks=pytest.mark.release(
                twin="tests/ops/plan/test_plan_layout_choice.py::test_the_smallest_model_parallelism_that_fits"
            ),
        ),
    ],
)
def test_the_smallest_model_parallelism_that_fits(name, model, nodes, parallel, smaller):
    requested = request(TrainConfig, name, model, *LENGTHS, f"trainer.nnodes={nodes}")
    layout, hardware = chosen(requested), read_hardware("h100")
    config = applied(requested, layout)  # raises if a check rejects it
    assert {key: value_at(config, key) for key in parallel} == parallel
    assert lacking(config, hardware) == [] and lacking(config, replace(hardware, memory_gib=8)) != []
    assert all(chosen.reason for chosen in layout.keys)
    for tp, pp in smaller:
        fixed = {**parallel, TP: tp, PP: pp}
        tried = request(TrainConfig, name, model, *requested.overrides[3:], *(f"{k}={v}" for k, v in fixed.items()))
        with raises("layout.nothing-fits", f"TP{tp} PP{pp}", error=NothingFitsError):
            chosen(tried, fixed)


def test_values_set_by_hand_stay_and_the_rest_follows():
    by_hand = {
        TP: 4,
        f"{ACTOR}.param_offload": False,
        "actor_rollout_ref.actor.max_token_len_per_gpu": 10240,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    }
    requested = request(
        TrainConfig, "grpo", "Qwen2.5-7B", *LENGTHS, *(f"{k}={format_value(v)}" for k, v in by_hand.items())
    )
    layout = chosen(requested, by_hand)
    assert not by_hand.keys() & layout.changes.keys()
    config = applied(requested, layout)
    assert {key: value_at(config, key) for key in by_hand} == by_hand
    assert config.actor_rollout_ref.actor.megatron.data_parallel_size == 2
    assert lacking(config, read_hardware("h100")) == []


def test_long_sequences_are_divided_over_context_parallel_ranks():
    """A 7B model has four key-value heads: beyond TP4, a million tokens need another division."""
    lengths = ("data.max_prompt_length=1024", "data.max_response_length=1047552")
    requested = request(TrainConfig, "grpo", "Qwen2.5-7B", *lengths, "trainer.nnodes=2")
    config = applied(requested, chosen(requested))
    assert config.actor_rollout_ref.actor.megatron.context_parallel_size > 1
    assert lacking(config, read_hardware("h100")) == []


@pytest.mark.parametrize(("schema", "name"), [(SFTConfig, "sft"), (PreferenceConfig, "preference")])
def test_supervised_jobs_get_layouts(schema, name):
    requested = request(schema, name, "Qwen2.5-32B", "data.max_length=4096", "trainer.nnodes=1")
    config = applied(requested, chosen(requested))
    assert config.megatron.devices_per_replica > 1 and lacking(config, read_hardware("h100")) == []


def test_an_embedded_engine_gets_fewer_slots_if_they_do_not_fit():
    requested = request(TrainConfig, "grpo", "Qwen2.5-7B", *LENGTHS, "actor_rollout_ref.rollout.name=embedded")
    config = applied(requested, chosen(requested, hardware="a100"))
    assert config.actor_rollout_ref.rollout.max_num_seqs < 256 and lacking(config, read_hardware("a100")) == []


def test_what_no_layout_solves_is_the_error_of_the_configuration():
    by_hand = {TP: 3}
    with raises("layout.replicas-do-not-divide", "3"):
        chosen(request(TrainConfig, "grpo", "Qwen2.5-7B", f"{TP}=3"), by_hand)
    with raises("batch.mini-batch-size", " 7 (actor_rollout_ref.actor.ppo_mini_batch_size)"):
        chosen(request(TrainConfig, "grpo", "Qwen2.5-7B", "actor_rollout_ref.actor.ppo_mini_batch_size=7"))


def test_uneven_layers_shorten_the_last_stage():
    config = train_config("DeepSeek-V3", megatron(8, 1), nodes=8)
    eight = [sizes for sizes in layouts(planned_job(config).role("actor"), 64, 8, 2048) if sizes[PP] == 8]
    assert eight and all(sizes[f"{ACTOR}.num_layers_in_last_pipeline_stage"] == 61 - 7 * 8 for sizes in eight)


def test_initial_sizes_divide_more_devices_than_the_mini_batch_has_samples():
    """With TP1 PP1 the 128 ranks of 16 nodes are more than the 64 samples of a mini-batch."""
    batches = ("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    alone = ("actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus")
    requested = request(TrainConfig, "grpo", "Qwen2.5-7B", *batches, *alone, "trainer.nnodes=16")
    with raises("batch.samples-per-rank", "128"):
        compose(requested)
    changes = initial_changes(draft(requested), read_hardware("h100"))
    assert changes[TP] * changes[PP] == 2
    compose(
        replace(requested, overrides=(*requested.overrides, *(f"{k}={format_value(v)}" for k, v in changes.items())))
    )


SMI = Path(__file__).parents[1] / "doctor" / "nvidia_smi.xml"


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
