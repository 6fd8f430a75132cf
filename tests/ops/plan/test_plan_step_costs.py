"""Planned weight syncs, and the cost of a step whose roles have separate devices."""

import pytest
from planned_jobs import megatron, train_config, train_job

from megarl.ops.plan import planned_job
from megarl.ops.plan.flops import lengths_of
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.step_costs import plan_sync, simultaneous_phases, step_cost, sync_s

H100 = read_hardware("h100")


def test_every_replica_receives_the_model_once():
    """Qwen2.5-7B has 7,615,616,512 parameters."""
    job = train_job("Qwen2.5-7B", megatron(2), devices=8)
    sync = plan_sync(job, H100)
    assert job.rollout.replicas == 8
    assert sync.total == 8 * 7_615_616_512 * 2
    assert sync.on_device + sync.within_nodes + sync.between_nodes == sync.total
    assert sync.between_nodes == 0


def test_weights_on_the_same_device_are_not_sent():
    """One device per replica on both sides: all weights stay on their device."""
    job = train_job("Qwen2.5-7B", megatron(1), devices=8)
    sync = plan_sync(job, H100)
    assert sync.on_device == sync.total and sync.most_received == sync.most_sent == 0


def test_seventy_billion_on_sixteen_nodes():
    """Each engine rank holds an eighth; a quarter of it, its pipeline stage, is on its device."""
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16,
                    actor_rollout_ref__rollout__tensor_model_parallel_size=8)  # fmt: skip
    sync = plan_sync(job, H100)
    per_rank = 70_553_706_496 * 2 / 8
    assert 0.7 * per_rank < sync.most_received < 0.8 * per_rank
    assert sync_s(job, H100) == pytest.approx(per_rank / 50e9, rel=0.01), "as if nothing stays on its device"


def test_external_servers_cost_nothing():
    servers = {"sglang": {"urls": ["http://a:1", "http://b:1"], "api_key_env": "KEY"}}
    config = train_config("Qwen2.5-7B", megatron(2), actor_rollout_ref__rollout__engine_kwargs=servers)
    job = planned_job(config)
    assert job.rollout.is_external and plan_sync(job, H100) is None and sync_s(job, H100) == 0.0


def test_phases_on_separate_devices_cost_as_much_as_the_longest():
    """Critic and reference have as many devices as in the shared pool, so each phase takes as long as there."""
    reference = {
        "algorithm__use_kl_in_reward": True,
        "actor_rollout_ref__ref__megatron": {"tensor_model_parallel_size": 4},
    }
    apart = {"critic__nnodes": 1, "actor_rollout_ref__ref__nnodes": 1}
    shared, pools = (
        step_cost(job, H100, lengths_of(job.config))
        for job in (train_job("Qwen2.5-7B", megatron(4), megatron(4), **reference, **keys) for keys in ({}, apart))
    )
    costs = {phase.phase: phase.cost.total for phase in shared.phases}
    assert {phase.phase: phase.cost.total for phase in pools.phases} == pytest.approx(costs)
    assert shared.total == pytest.approx(sum(costs.values())) and shared.simultaneous == ()
    assert pools.simultaneous == (("old_log_prob", "ref", "values"), ("update_critic", "update_actor"))
    passes = max(costs["old_log_prob"], costs["ref"], costs["values"])
    updates = max(costs["update_critic"], costs["update_actor"])
    assert pools.total == pytest.approx(costs["gen"] + passes + updates + costs["update_weights"])
    assert pools.devices == 24 and pools.mfu_of(pools.phases[1]) == pytest.approx(shared.mfu_of(shared.phases[1]))


def test_one_pool_of_the_critic_leaves_the_reference_in_order():
    reference = {
        "algorithm__use_kl_in_reward": True,
        "actor_rollout_ref__ref__megatron": {"tensor_model_parallel_size": 4},
    }
    job = train_job("Qwen2.5-7B", megatron(4), megatron(4), critic__nnodes=1, **reference)
    assert simultaneous_phases(job) == (("old_log_prob", "values"), ("update_critic", "update_actor"))
