"""Pass times: collectives by hand, the bubble formula, and published iteration times."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_jobs import OFFLOAD, megatron, train_job

from megarl.config.batch import MicroBatches
from megarl.models import ParallelLayout
from megarl.ops.plan.hardware import CollectiveGroup, CollectiveGroups, read_hardware
from megarl.ops.plan.lengths import Lengths, Quantiles, longest_lengths
from megarl.ops.plan.pass_times import PassTimer, TimeBreakdown
from megarl.ops.plan.step_times import micro_batches_of

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import plan_published_times

H100 = read_hardware("h100")


def pass_time(job, phase, lengths=None, role="actor"):
    planned_role = job.role(role)
    planned = planned_role.pass_of(phase)
    lengths = lengths or longest_lengths(job.longest_prompt, job.longest_response)
    return PassTimer(planned_role, H100, lengths, job.devices_per_node).time(
        planned, micro_batches_of(job, planned_role, planned)
    )


def test_ring_collectives_inside_and_between_nodes():
    gathered = 8e9
    inside = CollectiveGroup(8, 1, 8)
    assert inside.within_node and inside.gather_s(gathered, H100) == pytest.approx(7e9 / (450e9 * 0.75), rel=1e-3)
    assert inside.reduce_s(gathered, H100) == pytest.approx(2 * inside.gather_s(gathered, H100))
    # 16 ranks, eight on each of two nodes: eight adapters share the traffic between them
    both = CollectiveGroup(16, 1, 8)
    assert both.per_node == 8 and not both.within_node
    assert both.gather_s(gathered, H100) == pytest.approx(7.5e9 / min(450e9, 8 * 50e9) / 0.75, rel=1e-2)
    # one rank on each node: one adapter
    separate = CollectiveGroup(4, 8, 8)
    assert separate.per_node == 1 and separate.gather_s(gathered, H100) == pytest.approx(6e9 / 50e9 / 0.75, rel=1e-2)
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
    cost = pass_time(job, "old_log_prob").cost
    without_bubble = cost._replace(bubble=0.0, host=0.0).seconds
    assert cost.bubble == pytest.approx(without_bubble * (stages - 1) / (chunks * micro_batches))


def test_a_backward_pass_costs_two_forward_passes():
    job = train_job("Llama-3-70B", megatron(8, 1), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)
    forward, update = pass_time(job, "old_log_prob"), pass_time(job, "update_actor")
    assert update.flops.total == pytest.approx(3 * forward.flops.total)
    assert update.cost.compute == pytest.approx(3 * forward.cost.compute)
    recomputed = train_job("Llama-3-70B", megatron(8, 1, recompute_granularity="full"), nodes=16,
                      actor_rollout_ref__actor__ppo_mini_batch_size=64)  # fmt: skip
    assert pass_time(recomputed, "update_actor").cost.compute == pytest.approx(4 * forward.cost.compute, rel=0.03)
    assert pass_time(recomputed, "update_actor").flops == update.flops, "recomputation does not change model FLOPs"


def test_offloaded_states_are_copied_around_the_pass():
    """70.6B parameters over 32 ranks: 4.4 GB of weights in and out, 13.2 GB / 4 of optimizer state in and out."""
    job = train_job("Llama-3-70B", megatron(8, 4, **OFFLOAD), nodes=16)
    resident = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    assert pass_time(resident, "update_actor").cost.host == 0
    per_rank = 2.27e9
    expected = (2 * 2 * per_rank + 2 * 12 * per_rank / 4) / (50e9 * 0.8)
    assert pass_time(job, "update_actor").cost.host == pytest.approx(expected, rel=0.02)


def test_gradients_are_reduced_once_per_optimizer_step():
    """Four ranks on four nodes, with one adapter each, scatter float32 gradients and gather bfloat16 weights."""
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)
    one_step = pass_time(job, "update_actor").cost.data
    assert one_step == pytest.approx(2.27e9 * 6 * 3 / 4 / (50e9 * 0.75), rel=0.02)
    twice = train_job("Llama-3-70B", megatron(8, 4), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=32)
    assert pass_time(twice, "update_actor").cost.data == pytest.approx(2 * one_step)
    overlapped = train_job("Llama-3-70B", megatron(8, 4, overlap_grad_reduce=True, overlap_param_gather=True),
                           nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)  # fmt: skip
    assert pass_time(overlapped, "update_actor").cost.data < one_step


def test_micro_batches_are_packed_like_the_ranks_pack_them():
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    model = PassTimer(job.role("actor"), H100, longest_lengths(1, 1), 8)
    lengths = Quantiles.constant(3000).sample(64, 0)
    assert model.micro_batches(MicroBatches(max_tokens=8000), lengths) == 16 // 2
    assert model.micro_batches(MicroBatches(samples=4), lengths) == 4
    assert model.micro_batches(MicroBatches(max_tokens=8000, multiple=6), lengths) == 12


@pytest.mark.parametrize("case", plan_published_times.ITERATIONS, ids=lambda case: case.name)
def test_published_iterations_on_a100(case):
    """Table 5 of https://arxiv.org/abs/2205.05198; one matmul efficiency for all sizes, so 25 % tolerance."""
    assert plan_published_times.iteration_s(case, "selective") == pytest.approx(case.selective_s, rel=0.25)
    assert plan_published_times.iteration_s(case, "full") == pytest.approx(case.full_s, rel=0.25)


def test_shorter_responses_take_less_time():
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    short = Lengths(Quantiles.constant(512), Quantiles.log_normal(300, 0.8, 1024), "test")
    few, many = pass_time(job, "update_actor", short).cost, pass_time(job, "update_actor").cost
    # except for attention, which grows with the square
    assert few.compute / many.compute == pytest.approx((512 + 300) / (1024 + 1024), rel=0.05)
    assert few.data == many.data


def test_time_breakdowns_add_up():
    assert TimeBreakdown(1.0, 2.0).plus(TimeBreakdown(bubble=3.0)).times(2.0).seconds == 12.0
