"""Times of passes: collectives by hand, the bubble's formula, and published iteration times."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_jobs import OFFLOAD, megatron, train_job

from megarl.config.batch import MicroBatches
from megarl.models import ParallelLayout
from megarl.plan.groups import Group, Groups
from megarl.plan.hardware import read_hardware
from megarl.plan.lengths import Lengths, Quantiles, longest_lengths
from megarl.plan.pass_times import Cost, PassModel
from megarl.plan.times import micro_batches_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plan_published_times

H100 = read_hardware("h100")


def pass_time(job, phase, lengths=None, role="actor"):
    one = job.role(role)
    found = one.pass_of(phase)
    lengths = lengths or longest_lengths(job.longest_prompt, job.longest_response)
    return PassModel(one, H100, lengths, job.devices_per_node).time(found, micro_batches_of(job, one, found))


def test_a_ring_inside_a_node_and_between_nodes():
    gathered = 8e9
    inside = Group(8, 1, 8)
    assert inside.within_node and inside.gather_s(gathered, H100) == pytest.approx(7e9 / (450e9 * 0.75), rel=1e-3)
    assert inside.reduce_s(gathered, H100) == pytest.approx(2 * inside.gather_s(gathered, H100))
    # 16 ranks, eight on each of two nodes: eight adapters share what passes between them
    both = Group(16, 1, 8)
    assert both.per_node == 8 and not both.within_node
    assert both.gather_s(gathered, H100) == pytest.approx(7.5e9 / min(450e9, 8 * 50e9) / 0.75, rel=1e-2)
    # one rank on each node: one adapter
    apart = Group(4, 8, 8)
    assert apart.per_node == 1 and apart.gather_s(gathered, H100) == pytest.approx(6e9 / 50e9 / 0.75, rel=1e-2)
    assert Group(1, 1, 8).reduce_s(gathered, H100) == 0


def test_groups_are_numbered_as_megatrons():
    groups = Groups.of(ParallelLayout(tp=4, cp=2, dp=4, pp=2, ep=8, etp=1), 8)
    assert groups.tensor.within_node and groups.context.within_node
    assert (groups.data.size, groups.data.per_node) == (8, 2)
    assert (groups.expert.size, groups.expert.within_node) == (8, True)
    assert (groups.expert_data.size, groups.expert_data.per_node) == (4, 1)


@settings(max_examples=15)
@given(
    micro_batches=st.sampled_from([8, 16, 32]), stages=st.sampled_from([1, 2, 4, 8]), chunks=st.sampled_from([1, 2, 5])
)
def test_the_bubble_is_that_of_the_schedule(micro_batches, stages, chunks):
    """(p - 1) / (v m) of the rest, section 2.2 of https://arxiv.org/abs/2104.04473."""
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
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2,
    )
    cost = pass_time(job, "old_log_prob").cost
    rest = cost._replace(bubble=0.0, host=0.0).seconds
    assert cost.bubble == pytest.approx(rest * (stages - 1) / (chunks * micro_batches))


def test_a_backward_pass_is_two_forward_passes():
    job = train_job("Llama-3-70B", megatron(8, 1), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)
    forward, update = pass_time(job, "old_log_prob"), pass_time(job, "update_actor")
    assert update.work.total == pytest.approx(3 * forward.work.total)
    assert update.cost.compute == pytest.approx(3 * forward.cost.compute)
    again = train_job("Llama-3-70B", megatron(8, 1, recompute_granularity="full"), nodes=16,
                      actor_rollout_ref__actor__ppo_mini_batch_size=64)  # fmt: skip
    assert pass_time(again, "update_actor").cost.compute == pytest.approx(4 * forward.cost.compute, rel=0.03)
    assert pass_time(again, "update_actor").work == update.work, "the model's own operations are the same"


def test_offloaded_states_are_copied():
    """70.6B parameters over 32 ranks: 4.4 GB of weights there and back, 13.2 GB / 4 of optimizer likewise."""
    job = train_job("Llama-3-70B", megatron(8, 4, **OFFLOAD), nodes=16)
    resident = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    assert pass_time(resident, "update_actor").cost.host == 0
    per_rank = 2.27e9
    expected = (2 * 2 * per_rank + 2 * 12 * per_rank / 4) / (50e9 * 0.8)
    assert pass_time(job, "update_actor").cost.host == pytest.approx(expected, rel=0.02)


def test_gradients_are_summed_once_per_optimizer_step():
    """float32 gradients scattered and bfloat16 weights gathered by four ranks on four nodes, one adapter each."""
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)
    one_step = pass_time(job, "update_actor").cost.data
    assert one_step == pytest.approx(2.27e9 * 6 * 3 / 4 / (50e9 * 0.75), rel=0.02)
    twice = train_job("Llama-3-70B", megatron(8, 4), nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=32)
    assert pass_time(twice, "update_actor").cost.data == pytest.approx(2 * one_step)
    overlapped = train_job("Llama-3-70B", megatron(8, 4, overlap_grad_reduce=True, overlap_param_gather=True),
                           nodes=16, actor_rollout_ref__actor__ppo_mini_batch_size=64)  # fmt: skip
    assert pass_time(overlapped, "update_actor").cost.data < one_step


def test_micro_batches_are_packed_as_the_ranks_pack_them():
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    model = PassModel(job.role("actor"), H100, longest_lengths(1, 1), 8)
    lengths = Quantiles.constant(3000).sample(64, 0)
    assert model.micro_batches(MicroBatches(max_tokens=8000), lengths) == 16 // 2
    assert model.micro_batches(MicroBatches(samples=4), lengths) == 4
    assert model.micro_batches(MicroBatches(max_tokens=8000, multiple=6), lengths) == 12


@pytest.mark.parametrize("case", plan_published_times.ITERATIONS, ids=lambda case: case.name)
def test_published_iterations_on_a100(case):
    """Table 5 of https://arxiv.org/abs/2205.05198; the share of the peak is one number for all sizes, so 25 %."""
    assert plan_published_times.iteration_s(case, "selective") == pytest.approx(case.selective_s, rel=0.25)
    assert plan_published_times.iteration_s(case, "full") == pytest.approx(case.full_s, rel=0.25)


def test_shorter_answers_take_less():
    job = train_job("Llama-3-70B", megatron(8, 4), nodes=16)
    short = Lengths(Quantiles.constant(512), Quantiles.log_normal(300, 0.8, 1024), "test")
    few, many = pass_time(job, "update_actor", short).cost, pass_time(job, "update_actor").cost
    # attention, which grows with the square, aside
    assert few.compute / many.compute == pytest.approx((512 + 300) / (1024 + 1024), rel=0.05)
    assert few.data == many.data


def test_costs_add_up():
    assert Cost(1.0, 2.0).plus(Cost(bubble=3.0)).times(2.0).seconds == 12.0
