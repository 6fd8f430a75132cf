"""Runs that do not fit, and the smallest change that makes them fit."""

import pytest
from planned_jobs import OFFLOAD, megatron, train_config

from megarl.config.keys import value_at
from megarl.ops.plan.estimate import changed, estimate, find_suggestion, overrides_of
from megarl.ops.plan.flops import lengths_of
from megarl.ops.plan.hardware import read_hardware

H100 = read_hardware("h100")


def planned(config):
    return estimate(config, H100, lengths_of(config))


def suggestion_for(config):
    plan = planned(config)
    assert not plan.fits
    suggestion = find_suggestion(plan)
    if suggestion is not None:
        assert planned(changed(config, suggestion)).fits
    return suggestion


def seventy_billion(actor=None, critic=None, **sections):
    sections.setdefault("actor_rollout_ref__rollout__tensor_model_parallel_size", 8)
    return train_config("Llama-3-70B", actor or megatron(8, 4), critic, nodes=16, **sections)


def test_a_run_that_fits_has_no_shortfalls():
    plan = planned(seventy_billion(megatron(8, 4, **OFFLOAD), megatron(8, 4, **OFFLOAD)))
    assert plan.fits and plan.shortfalls == ()


def test_offloading_idle_roles_is_suggested_first():
    """70B and its critic are in device memory while the other updates: offloading is the cheapest change."""
    layout = megatron(8, 2)
    budgets = {"actor_rollout_ref__actor__max_token_len_per_gpu": 4096, "critic__max_token_len_per_gpu": 4096}
    suggestion = suggestion_for(seventy_billion(layout, layout, **budgets))
    assert suggestion is not None and all(path.endswith("_offload") for path in suggestion)


def test_recomputation_is_suggested():
    tight = seventy_billion(megatron(8, 4), data__train_batch_size=1024,
                            actor_rollout_ref__actor__ppo_mini_batch_size=1024,
                            actor_rollout_ref__actor__max_token_len_per_gpu=24576)  # fmt: skip
    suggestion = suggestion_for(tight)
    assert [path.rpartition(".")[2] for path in suggestion] == ["recompute_granularity"]
    assert overrides_of(suggestion)[0].startswith("actor_rollout_ref.actor.megatron.recompute_granularity=")


def test_a_larger_replica_is_suggested():
    config = seventy_billion(megatron(8, 4, **OFFLOAD), actor_rollout_ref__rollout__tensor_model_parallel_size=1)
    plan = planned(config)
    assert {shortfall.phase for shortfall in plan.shortfalls} == {"gen", "update_weights"}
    assert any("room for 0 tokens" in shortfall.text for shortfall in plan.shortfalls)
    suggestion = suggestion_for(config)
    assert suggestion == {"actor_rollout_ref.rollout.tensor_model_parallel_size": 4}


def test_every_change_of_a_suggestion_is_necessary():
    """Without any one of the changes, the run does not fit."""
    layout = megatron(8, 1)
    config = seventy_billion(layout, layout)
    suggestion = suggestion_for(config)
    assert suggestion is not None and len(suggestion) > 1
    for path in suggestion:
        fewer = {key: value for key, value in suggestion.items() if key != path}
        assert not planned(changed(config, fewer)).fits


def test_a_replica_over_several_nodes_is_suggested():
    """671B in bfloat16 need 158 GiB on each of a node's eight devices, and a quarter of it over four nodes."""
    config = train_config("DeepSeek-V3", megatron(8, 8, num_layers_in_last_pipeline_stage=5,
                                                  expert_model_parallel_size=32, expert_tensor_parallel_size=1,
                                                  recompute_granularity="full", **OFFLOAD),
                          nodes=32, actor_rollout_ref__rollout__tensor_model_parallel_size=8)  # fmt: skip
    suggestion = suggestion_for(config)
    assert suggestion is not None
    assert suggestion == {"actor_rollout_ref.rollout.tensor_model_parallel_size": 32}


def test_host_memory_shortfall():
    small = read_hardware("h100")
    small.host_memory_gib = 16
    config = seventy_billion(megatron(8, 4, **OFFLOAD))
    plan = estimate(config, small, lengths_of(config))
    assert [shortfall.phase for shortfall in plan.shortfalls] == ["host"]
    assert "GiB, of 14 usable" in plan.shortfalls[0].text


def test_overrides_of_free_keys_have_a_plus():
    key = "actor_rollout_ref.rollout.engine_kwargs.sglang.server_args.mem_fraction_static"
    assert overrides_of({key: 0.9, "trainer.nnodes": 2}) == [f"+{key}=0.9", "trainer.nnodes=2"]


@pytest.mark.parametrize(
    ("path", "value", "follows"),
    [
        ("trainer.nnodes", 32, {"actor_rollout_ref.actor.megatron.data_parallel_size": 8,
                                "actor_rollout_ref.rollout.replicas": 32}),
        ("actor_rollout_ref.actor.max_token_len_per_gpu", 4096,
         {"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 4096}),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 4,
         {"actor_rollout_ref.actor.megatron.data_parallel_size": 8}),
    ],
)  # fmt: skip
def test_derived_values_follow_a_change(path, value, follows):
    config = seventy_billion()
    result = changed(config, {path: value})
    assert value_at(result, path) == value and value_at(config, path) != value
    assert {key: value_at(result, key) for key in follows} == follows
