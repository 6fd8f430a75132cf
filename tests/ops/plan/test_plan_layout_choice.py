"""Chosen layouts fit and pass all checks; smaller model parallelism does not fit, and values set by hand stay."""

from dataclasses import replace

import pytest
from planned_jobs import MODELS
from support.expected_errors import raises

from megarl.config import PreferenceConfig, SFTConfig, TrainConfig
from megarl.config.compose import ConfigRequest, compose, compose_draft
from megarl.config.keys import value_at
from megarl.config.problems import format_value
from megarl.ops.plan.estimate import shortfalls, usable_bytes
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.job_from_config import planned_job
from megarl.ops.plan.layout_choice import NothingFitsError, choose_layout
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
    return choose_layout(compose_draft(requested), keys, read_hardware(hardware))


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
