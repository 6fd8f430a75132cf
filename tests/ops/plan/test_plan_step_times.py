"""Planned weight syncs: bytes and traffic between devices and nodes."""

import pytest
from planned_jobs import megatron, train_config, train_job

from megarl.ops.plan import planned_job
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.step_times import plan_sync, rough_sync_s

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
    assert sync.limit == "memory" and sync.seconds < 0.05


def test_seventy_billion_on_sixteen_nodes():
    """Each engine rank holds an eighth; a quarter of it, its pipeline stage, is on its device."""
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16,
                    actor_rollout_ref__rollout__tensor_model_parallel_size=8)  # fmt: skip
    sync = plan_sync(job, H100)
    per_rank = 70_553_706_496 * 2 / 8
    assert 0.7 * per_rank < sync.most_received < 0.8 * per_rank
    assert sync.limit == "network"
    assert sync.seconds == pytest.approx(max(sync.most_received, sync.most_sent) / (50e9 * 0.75), rel=0.02)
    assert 0.7 < sync.seconds / rough_sync_s(job, H100) < 1.1


def test_external_servers_are_not_timed():
    servers = {"sglang": {"urls": ["http://a:1", "http://b:1"], "api_key_env": "KEY"}}
    config = train_config("Qwen2.5-7B", megatron(2), actor_rollout_ref__rollout__engine_kwargs=servers)
    job = planned_job(config)
    assert job.rollout.is_external and plan_sync(job, H100) is None and rough_sync_s(job, H100) == 0.0
