"""Properties of all layouts, and Megatron's schedules."""

from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_jobs import megatron, train_job

from megarl.models import ParallelLayout
from megarl.ops.plan.job import PlannedPass
from megarl.ops.plan.pass_activations import in_flight, role_activations
from megarl.ops.plan.states import StateCounter

SIZES = st.sampled_from([1, 2, 4])


@cache
def unsplit(model):
    return train_job(model, devices=1).role("actor")


def actor(model, layout, **fields):
    role = unsplit(model)
    role = replace(role, layout=layout, megatron=replace(role.megatron, **fields))
    layers = layout.pp * layout.vpp * 2
    experts = role.model.experts and replace(role.model.experts, layers=(True,) * layers)
    return replace(role, model=replace(role.model, num_layers=layers, experts=experts))


@settings(max_examples=15)
@given(tp=SIZES, pp=SIZES, dp=SIZES, cp=st.sampled_from([1, 2]), vpp=st.sampled_from([1, 2]), overlap=st.booleans())
def test_optimizer_shares_sum_to_the_model(tp, pp, dp, cp, vpp, overlap):
    layout = ParallelLayout(tp, pp, dp, cp, vpp=vpp if pp > 1 else 1)
    counter = StateCounter(actor("Qwen2.5-7B", layout, overlap_grad_reduce=overlap))
    for stage in range(layout.pp):
        ranks = [layout.rank(tp=tp - 1, dp=d, pp=stage, cp=c) for d in range(dp) for c in range(cp)]
        states = [counter.of(rank) for rank in ranks]
        assert sum(rank_states.main_weights for rank_states in states) == 4 * states[0].parameters
        assert all(rank_states.gradients == 2 * rank_states.weights for rank_states in states)
        assert states[0].weights >= 2 * states[0].parameters


@settings(max_examples=15)
@given(tp=SIZES, ep=st.sampled_from([1, 2, 8]), etp=st.sampled_from([0, 1]), dp=st.sampled_from([2, 4, 8]))
def test_dense_and_expert_optimizer_states_are_sharded_over_their_replicas(tp, ep, etp, dp):
    layout = ParallelLayout(tp=tp, dp=dp, ep=ep, etp=etp)
    if layout.ranks_per_stage % (layout.expert_tp * ep):
        return
    role = actor("Qwen3-30B-A3B", layout)
    counter = StateCounter(role)
    # every tensor-parallel rank holds a copy of norms and routers
    copied = 2 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    vocabulary = 2 * -(-151936 // (16 * tp)) * 16 * tp * 2048
    layers = 2 * ((32 + 32 + 4 + 4) * 128 * 2048 + 128 * 3 * 768 * 2048)
    total = sum(counter.of(rank).main_weights for rank in range(layout.world_size))
    assert total == 4 * (vocabulary + layers + tp * copied)


@pytest.mark.parametrize(("pp", "vpp", "count"), [(2, 1, 8), (4, 1, 2), (4, 1, 16), (2, 2, 4), (2, 3, 8), (4, 2, 8)])
def test_micro_batches_in_flight_follow_megatrons_schedule(pp, vpp, count):
    """Forwards minus backwards of each chunk, when the stage first holds the most micro-batches."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    table = [chunk for _, chunk in get_schedule_table(count, vpp, pp)]
    for stage in range(pp):
        place = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage),
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        )
        total, _, ahead, _ = get_pp_rank_microbatches(count, vpp, pp, p2p_communicator=place)
        # Warm-up forwards, then alternating forward and backward.
        order = [(chunk, 1) for chunk in table[:ahead]]
        for number in range(total):
            order += [(table[ahead + number], 1)] if ahead + number < total else []
            order.append((vpp - 1 - table[number], -1))
        in_flight_now, most = Counter[int](), Counter[int]()
        for chunk, change in order:
            in_flight_now[chunk] += change
            if in_flight_now.total() > most.total():
                most = in_flight_now.copy()
        assert not in_flight_now.total() and in_flight(pp, vpp, stage, count) == [most[chunk] for chunk in range(vpp)]


@settings(max_examples=15)
@given(
    tokens=st.integers(1, 2**15),
    tp=SIZES,
    pp=SIZES,
    model=st.sampled_from(["Qwen2.5-7B", "Qwen3-30B-A3B", "DeepSeek-V3"]),
    fused=st.booleans(),
)
def test_recomputation_saves_memory_and_more_tokens_cost_memory(tokens, tp, pp, model, fused):
    planned = PlannedPass("update", True, tokens, tokens, 8, 1, 0, longest=tokens)
    layout = ParallelLayout(tp=tp, pp=pp)
    plain = actor(model, layout)
    full = actor(model, layout, recompute_granularity="full")
    selective = actor(model, layout, recompute_granularity="selective", recompute_modules=["core_attn"])
    for stage in range(pp):
        sizes = [role_activations(role, planned, stage, fused=fused).layers for role in (full, selective, plain)]
        assert sizes == sorted(sizes)
        larger = role_activations(plain, replace(planned, tokens=tokens + 64), stage, fused=fused)
        assert larger.layers > sizes[-1]


def test_more_devices_reduce_the_optimizer_state_per_device():
    few = StateCounter(train_job("Llama-3-70B", megatron(8, 4), nodes=4).role("actor")).of(0)
    many = StateCounter(train_job("Llama-3-70B", megatron(8, 4), nodes=16).role("actor")).of(0)
    assert many.weights == few.weights and many.optimizer < few.optimizer / 3.9
