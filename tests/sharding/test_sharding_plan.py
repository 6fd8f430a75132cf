import time
from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_cases import box, cases, labelled_checkpoint, rollout_tensors, training_tensors, weight_map_of

from megarl.models import ParallelLayout
from megarl.sharding import RolloutLayout, build_plan, check_coverage

ELEMENT = 4


def moves_of(plan):
    return [move for bucket in plan.buckets for move in bucket.moves]


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([4, 20, 100, 1000, 1 << 20]))
def test_every_destination_element_comes_once_from_the_right_element(case, bucket_bytes):
    weight_map, train, rollout_tp, replicas = case
    checkpoint = labelled_checkpoint(weight_map)
    plan = build_plan(weight_map, train, RolloutLayout(rollout_tp, 1, replicas), bucket_bytes, ELEMENT)
    source = training_tensors(weight_map, train, checkpoint)
    expected = rollout_tensors(weight_map, rollout_tp, replicas, checkpoint)
    arrived = [{name: torch.zeros_like(t) for name, t in rank.items()} for rank in expected]
    for move in moves_of(plan):
        # Adding, not assigning: an element that is sent twice comes out wrong.
        shape = move.shape[len(move.shape) - len(move.src_start) :]
        sent = source[move.src_rank][move.src_param][box(move.src_start, shape)]
        arrived[move.dst_rank][move.dst_param][box(move.dst_start, move.shape)] += sent.reshape(move.shape)
    for rank, weights in enumerate(expected):
        for name, tensor in weights.items():
            assert torch.equal(arrived[rank][name], tensor), (rank, name)
    check_coverage(
        plan, {rank: weight_map.rollout_params(rollout_tp, rank % rollout_tp) for rank in range(len(expected))}
    )


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([4, 20, 100, 1000]))
def test_no_rank_sends_or_receives_more_than_a_bucket(case, bucket_bytes):
    weight_map, train, rollout_tp, replicas = case
    plan = build_plan(weight_map, train, RolloutLayout(rollout_tp, 1, replicas), bucket_bytes, ELEMENT)
    for bucket in plan.buckets:
        sent, received = Counter(), Counter()
        for move in bucket.moves:
            sent[move.src_rank] += ELEMENT * prod(move.shape)
            received[move.dst_rank] += ELEMENT * prod(move.shape)
        assert 0 < max(*sent.values(), *received.values(), 0) <= bucket_bytes
        assert bucket.nbytes == sum(sent.values())


@settings(max_examples=20, deadline=None)
@given(cases())
def test_bytes_moved_are_those_of_the_weights_without_padding(case):
    weight_map, train, rollout_tp, replicas = case
    plan = build_plan(weight_map, train, RolloutLayout(rollout_tp, 1, replicas), 1000, ELEMENT)
    # Unsplit parameters go to every rank of a replica, all others to one.
    held = sum(
        prod(p.shape)
        for r in range(rollout_tp)
        for param in weight_map.rollout_params(rollout_tp, r)
        for p in param.pieces
    )
    assert plan.nbytes == ELEMENT * held * replicas


def test_the_same_arguments_give_the_same_plan():
    arguments = (ParallelLayout(2, 2, 2), RolloutLayout(4, 1, 3), 200, ELEMENT)
    assert build_plan(weight_map_of(), *arguments) == build_plan(weight_map_of(), *arguments)


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_the_load_is_spread_over_data_parallel_ranks(replicas):
    train = ParallelLayout(tp=2, pp=1, dp=4)
    weight_map = weight_map_of(layers=8, hidden=8, ffn=16)
    plan = build_plan(weight_map, train, RolloutLayout(1, 1, replicas), 1 << 20, ELEMENT)
    sent = Counter()
    for move in moves_of(plan):
        sent[move.src_rank] += prod(move.shape)
    assert len(sent) == train.world_size
    largest = max(prod(move.shape) for move in moves_of(plan))
    for tp_rank in range(train.tp):  # between these the vocabulary's padding makes a difference
        loads = [sent[train.rank(tp=tp_rank, dp=dp)] for dp in range(train.dp)]
        assert max(loads) - min(loads) <= largest


def test_all_pipeline_stages_send_in_the_first_bucket():
    weight_map, train = weight_map_of(layers=12), ParallelLayout(tp=1, pp=4)
    plan = build_plan(weight_map, train, RolloutLayout(), plan_quarter(weight_map), ELEMENT)
    assert len(plan.buckets) >= 4
    assert {move.src_rank for move in plan.buckets[0].moves} == {0, 1, 2, 3}


def plan_quarter(weight_map):
    return ELEMENT * sum(prod(shape) for shape in weight_map.hf_shapes().values()) // 4


def test_a_bucket_must_hold_an_element():
    with pytest.raises(ValueError, match="bucket_bytes=3 must hold"):
        build_plan(weight_map_of(), ParallelLayout(), RolloutLayout(), 3, ELEMENT)


def test_a_70b_model_on_a_thousand_ranks_is_planned_in_seconds():
    weight_map = weight_map_of(
        "LlamaForCausalLM", layers=80, hidden=8192, ffn=28672, heads=64, groups=8, head_dim=128, vocab=128256
    )
    started = time.process_time()
    plan = build_plan(weight_map, ParallelLayout(tp=8, pp=8, dp=16), RolloutLayout(4, 1, 8), 1 << 29, 2)
    check_coverage(plan, {31: weight_map.rollout_params(4, 3)})
    assert time.process_time() - started < 20
    assert len({move.src_rank for move in moves_of(plan)}) == 1024
    assert plan.nbytes > 8 * 140e9
