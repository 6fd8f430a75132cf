"""Weight syncs: bytes of the models, and who passes them to whom."""

import pytest
from planned_jobs import megatron, train_config, train_job

from megarl.plan import planned_job
from megarl.plan.hardware import read_hardware
from megarl.plan.sync import plan_sync, rough_sync_s

H100 = read_hardware("h100")


def test_every_replica_receives_the_model_once():
    """Qwen2.5-7B has 7,615,616,512 parameters."""
    job = train_job("Qwen2.5-7B", megatron(2), devices=8)
    sync = plan_sync(job, H100)
    assert job.rollout.replicas == 8
    assert sync.total == 8 * 7_615_616_512 * 2
    assert sync.on_device + sync.within_nodes + sync.between_nodes == sync.total
    assert sync.between_nodes == 0


def test_what_is_at_hand_does_not_travel():
    """Both sides at one device per replica: all of it stays."""
    job = train_job("Qwen2.5-7B", megatron(1), devices=8)
    sync = plan_sync(job, H100)
    assert sync.on_device == sync.total and sync.most_received == sync.most_sent == 0
    assert sync.limit == "memory" and sync.seconds < 0.05


def test_seventy_billion_on_sixteen_nodes():
    """Each engine rank holds an eighth; of it a quarter is on its own device, its pipeline stage's."""
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16,
                    actor_rollout_ref__rollout__tensor_model_parallel_size=8)  # fmt: skip
    sync = plan_sync(job, H100)
    own = 70_553_706_496 * 2 / 8
    assert 0.7 * own < sync.most_received < 0.8 * own
    assert sync.limit == "network"
    assert sync.seconds == pytest.approx(max(sync.most_received, sync.most_sent) / (50e9 * 0.75), rel=0.02)
    assert 0.7 < sync.seconds / rough_sync_s(job, H100) < 1.1


def test_somebody_elses_servers_are_not_ours_to_time():
    servers = {"sglang": {"urls": ["http://a:1", "http://b:1"]}}
    config = train_config("Qwen2.5-7B", megatron(2), actor_rollout_ref__rollout__engine_kwargs=servers)
    job = planned_job(config)
    assert job.rollout.is_elsewhere and plan_sync(job, H100) is None and rough_sync_s(job, H100) == 0.0
