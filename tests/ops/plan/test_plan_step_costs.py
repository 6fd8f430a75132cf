"""Planned weight syncs, and the cost of a step whose roles have separate devices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_jobs import OFFLOAD, megatron, train_config, train_job

from megarl.config.batch import MicroBatches
from megarl.models import ParallelLayout
from megarl.ops.plan.flops import Cost, Lengths, lengths_of
from megarl.ops.plan.hardware import CollectiveGroup, CollectiveGroups, read_hardware
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.step_costs import PassModel, pass_costs, plan_sync, simultaneous_phases, step_cost, sync_s

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


def pass_cost(job, phase, lengths=None, hardware=H100):
    costs = pass_costs(job, job.role("actor"), hardware, lengths or lengths_of(job.config))
    return next(cost for cost in costs if cost.phase == phase)


def test_ring_collectives_inside_and_between_nodes():
    gathered = 8e9
    inside = CollectiveGroup(8, 1, 8)
    assert inside.within_node and inside.gather_s(gathered, H100) == pytest.approx(7e9 / 450e9, rel=1e-3)
    assert inside.reduce_s(gathered, H100) == pytest.approx(2 * inside.gather_s(gathered, H100))
    # 16 ranks, eight on each of two nodes: eight adapters share the traffic between them
    both = CollectiveGroup(16, 1, 8)
    assert both.per_node == 8 and not both.within_node
    assert both.gather_s(gathered, H100) == pytest.approx(7.5e9 / min(450e9, 8 * 50e9), rel=1e-2)
    # one rank on each node: one adapter
    separate = CollectiveGroup(4, 8, 8)
    assert separate.per_node == 1 and separate.gather_s(gathered, H100) == pytest.approx(6e9 / 50e9, rel=1e-2)
    assert CollectiveGroup(1, 1, 8).reduce_s(gathered, H100) == 0


def test_groups_follow_megatrons_rank_order():
    groups = CollectiveGroups.of(ParallelLayout(tp=4, cp=2, dp=4, pp=2, ep=8, etp=1), 8)
    assert groups.tensor.within_node and groups.context.within_node
    assert (groups.data.size, groups.data.per_node) == (8, 2)
    assert (groups.expert.size, groups.expert.within_node) == (8, True)
    assert (groups.expert_data.size, groups.expert_data.per_node) == (4, 1)


@settings(max_examples=15)
@given(
    micro_batches=st.sampled_from([8, 16, 32]), stages=st.sampled_from([1, 2, 4, 8]), chunks=st.sampled_from([1, 2, 5])
)
def test_pipeline_bubble_follows_the_formula(micro_batches, stages, chunks):
    """The bubble is (p - 1) / (v m) of the remaining time, section 2.2 of https://arxiv.org/abs/2104.04473."""
    if stages == 1:
        chunks = 1
    layout = {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
    samples = 2 * micro_batches * (128 // (8 * stages))
    job = train_job(
        "Llama-3-70B",
        megatron(8, stages, **layout),
        nodes=16,
        data__train_batch_size=samples // 2,
        actor_rollout_ref__actor__ppo_mini_batch_size=samples // 2,
        actor_rollout_ref__actor__micro_batch_size_per_gpu=2,
    )
    cost = pass_cost(job, "old_log_prob").cost
    without_bubble = cost._replace(bubble=0.0, host=0.0).total
    assert cost.bubble == pytest.approx(without_bubble * (stages - 1) / (chunks * micro_batches))


def test_a_backward_pass_costs_two_forward_passes():
    job = train_job("Llama-3-70B", megatron(8, 1), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)
    forward, update = pass_cost(job, "old_log_prob"), pass_cost(job, "update_actor")
    assert update.flops == pytest.approx(3 * forward.flops)
    assert update.cost.compute == pytest.approx(3 * forward.cost.compute)
    recomputed = train_job("Llama-3-70B", megatron(8, 1, recompute_granularity="full"), nodes=16,
                      actor_rollout_ref__actor__ppo_mini_batch_size=64)  # fmt: skip
    assert pass_cost(recomputed, "update_actor").cost.compute == pytest.approx(4 * forward.cost.compute, rel=0.03)
    assert pass_cost(recomputed, "update_actor").flops == update.flops, "recomputation does not change model FLOPs"


def test_offloaded_states_are_copied_around_the_pass():
    """70.6B parameters over 32 ranks: 4.4 GB of weights in and out, 13.2 GB / 4 of optimizer state in and out."""
    job = train_job("Llama-3-70B", megatron(8, 4, **OFFLOAD), nodes=16)
    resident = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    assert pass_cost(resident, "update_actor").cost.host == 0
    per_rank = 2.27e9
    expected = (2 * 2 * per_rank + 2 * 12 * per_rank / 4) / 50e9
    assert pass_cost(job, "update_actor").cost.host == pytest.approx(expected, rel=0.02)


def test_gradients_are_reduced_once_per_optimizer_step():
    """Four ranks on four nodes, with one adapter each, scatter float32 gradients and gather bfloat16 weights."""
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)
    one_step = pass_cost(job, "update_actor").cost.data
    assert one_step == pytest.approx(2.27e9 * 6 * 3 / 4 / 50e9, rel=0.02)
    twice = train_job("Llama-3-70B", megatron(8, 4), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=32)
    assert pass_cost(twice, "update_actor").cost.data == pytest.approx(2 * one_step)


def test_micro_batches_are_filled_up_to_the_budget():
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    model = PassModel(job.role("actor"), H100, Lengths(1000, 2000, 2000, "test"), 8)
    assert model.micro_batches(MicroBatches(max_tokens=8000), 16) == 16 // 2
    assert model.micro_batches(MicroBatches(samples=4), 16) == 4
    assert model.micro_batches(MicroBatches(max_tokens=8000, multiple=6), 16) == 12


def test_shorter_responses_take_less_time():
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    short = Lengths(512, 300, 1024, "test")
    few, many = pass_cost(job, "update_actor", short).cost, pass_cost(job, "update_actor").cost
    # except for attention, which grows with the square
    assert few.compute / many.compute == pytest.approx((512 + 300) / (1024 + 1024), rel=0.05)
    assert few.data == many.data


def test_costs_add_up_and_calibrated_hardware_divides_them():
    assert Cost(1.0, 2.0).plus(Cost(bubble=3.0)).times(2.0).total == 12.0
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    calibrated = read_hardware("h100")
    calibrated.efficiencies = {"update_actor": 0.5, "gen": 0.3}
    for phase, efficiency in {"update_actor": 0.5, "old_log_prob": 0.4}.items():  # the mean of the known phases
        peak, reached = (pass_cost(job, phase, hardware=node) for node in (H100, calibrated))
        assert reached.cost.total == pytest.approx(peak.cost.total / efficiency) and reached.flops == peak.flops
