"""What does not fit, and the smallest change with which it does."""

import pytest
from planned_jobs import OFFLOAD, megatron, train_config

from megarl.config.problems import value_at
from megarl.plan.estimate import changed, estimate
from megarl.plan.hardware import read_hardware
from megarl.plan.lengths import longest_lengths
from megarl.plan.verdict import Remedy, find_remedy

H100 = read_hardware("h100")


def planned(config):
    return estimate(config, H100, longest_lengths(1024, 1024), with_sync=False)


def remedy_of(config):
    found = planned(config)
    assert not found.fits
    remedy = find_remedy(config, found, lambda remedy: planned(changed(config, remedy.changes)))
    if remedy is not None:
        assert planned(changed(config, remedy.changes)).fits
    return remedy


def seventy_billion(actor=None, critic=None, **sections):
    sections.setdefault("actor_rollout_ref__rollout__tensor_model_parallel_size", 8)
    return train_config("Llama-3-70B", actor or megatron(8, 4), critic, nodes=16, **sections)


def test_what_fits_needs_nothing():
    found = planned(seventy_billion(megatron(8, 4, **OFFLOAD), megatron(8, 4, **OFFLOAD)))
    assert found.fits and found.shortfalls == ()


def test_states_of_resting_roles_go_to_host_memory_first():
    """70B and its critic in one device's memory while the other updates: offloading is the cheapest way out."""
    layout = megatron(8, 2)
    remedy = remedy_of(seventy_billion(layout, layout, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=4096,
                                       critic__ppo_max_token_len_per_gpu=4096))  # fmt: skip
    assert remedy is not None and all(path.endswith("_offload") for path in remedy.changes)


def test_activations_are_computed_again():
    tight = seventy_billion(megatron(8, 4), data__train_batch_size=1024,
                            actor_rollout_ref__actor__ppo_mini_batch_size=1024,
                            actor_rollout_ref__actor__ppo_max_token_len_per_gpu=24576)  # fmt: skip
    remedy = remedy_of(tight)
    assert [path.rpartition(".")[2] for path in remedy.changes] == ["recompute_granularity"]
    assert remedy.overrides()[0].startswith("actor_rollout_ref.actor.megatron.recompute_granularity=")


def test_a_replica_that_cannot_hold_the_model_gets_more_devices():
    config = seventy_billion(megatron(8, 4, **OFFLOAD), actor_rollout_ref__rollout__tensor_model_parallel_size=1)
    found = planned(config)
    assert {one.phase for one in found.shortfalls} == {"gen", "update_weights"}
    assert any("room for 0 tokens" in one.text for one in found.shortfalls)
    remedy = remedy_of(config)
    assert remedy.changes == {"actor_rollout_ref.rollout.tensor_model_parallel_size": 4}


def test_no_change_is_without_need():
    """Leaving out any part of a remedy of several changes leaves something that does not fit."""
    layout = megatron(8, 1)
    config = seventy_billion(layout, layout)
    remedy = remedy_of(config)
    assert remedy is not None and len(remedy.changes) > 1
    for path in remedy.changes:
        fewer = {other: value for other, value in remedy.changes.items() if other != path}
        assert not planned(changed(config, fewer)).fits


def test_what_nothing_helps_is_told_as_such():
    """671B in bfloat16 need 158 GiB of each of a node's eight devices."""
    config = train_config("DeepSeek-V3", megatron(8, 8, num_layers_in_last_pipeline_stage=5,
                                                  expert_model_parallel_size=32, expert_tensor_parallel_size=1,
                                                  recompute_granularity="full", **OFFLOAD),
                          nodes=32, actor_rollout_ref__rollout__tensor_model_parallel_size=8)  # fmt: skip
    assert remedy_of(config) is None


def test_memory_of_a_node():
    small = read_hardware("h100")
    small.host_memory_gib = 16
    config = seventy_billion(megatron(8, 4, **OFFLOAD))
    found = estimate(config, small, longest_lengths(1024, 1024), with_sync=False)
    assert [one.phase for one in found.shortfalls] == ["host"]
    assert "GiB, of 14 usable" in found.shortfalls[0].text


def test_overrides_of_free_keys_have_a_plus():
    key = "actor_rollout_ref.rollout.engine_kwargs.sglang.server_args.mem_fraction_static"
    assert Remedy({key: 0.9, "trainer.nnodes": 2}).overrides() == [f"+{key}=0.9", "trainer.nnodes=2"]


@pytest.mark.parametrize(
    ("path", "value", "follows"),
    [
        ("trainer.nnodes", 32, {"actor_rollout_ref.actor.megatron.data_parallel_size": 8,
                                "actor_rollout_ref.rollout.replicas": 32}),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 4096,
         {"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 4096}),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 4,
         {"actor_rollout_ref.actor.megatron.data_parallel_size": 8}),
    ],
)  # fmt: skip
def test_what_follows_from_a_value_changes_with_it(path, value, follows):
    config = seventy_billion()
    other = changed(config, {path: value})
    assert value_at(other, path) == value and value_at(config, path) != value
    assert {key: value_at(other, key) for key in follows} == follows
