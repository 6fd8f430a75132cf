"""Coverage of a plan, and comparison of checksums: each fault is named by parameter, rank and region."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import ListedPlan, plan_cases, rollout_params
from resharding_cases import cases, labelled_checkpoint, rollout_tensors, training_tensors, weight_map_of
from support.expected_errors import raises

from megarl.models import LocalParam, ParallelLayout, Piece
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import Bucket, TransferOp, build_plan
from megarl.sharding.verification import PartialChecksum, check_coverage, compare_checksums, partial_checksums


def plan_of(*ops):
    return ListedPlan((Bucket(tuple(ops), 0),))


def op(start, shape, param="w", rank=0):
    return TransferOp(0, "src", rank, param, (0,) * len(shape), start, shape)


PARAM = LocalParam("w", (4, 6), (Piece("hf", (0, 0), (3, 6), (0, 0)),))  # the last row is padding


def test_any_exact_tiling_passes_the_coverage_check():
    check_coverage(plan_of(op((0, 0), (3, 6))), {0: [PARAM]})
    check_coverage(plan_of(op((0, 0), (3, 2)), op((0, 2), (1, 4)), op((1, 2), (2, 4))), {0: [PARAM]})


@pytest.mark.parametrize(
    ("ops", "named"),
    [
        ([], ["[0, 0] to [3, 6]", "0 times instead of 1"]),
        ([op((0, 0), (2, 6))], ["[2, 0] to [3, 6]", "0 times instead of 1"]),
        ([op((0, 0), (3, 6)), op((1, 1), (1, 2))], ["[1, 1] to [2, 3]", "2 times instead of 1"]),
        ([op((0, 0), (4, 6))], ["[3, 0] to [4, 6]", "1 times instead of 0"]),
        # Right in number, wrong in place.
        ([op((0, 0), (2, 6)), op((1, 0), (1, 6))], ["[1, 0] to [2, 6]", "2 times instead of 1"]),
    ],
)
def test_a_coverage_error_names_the_elements(ops, named):
    with raises("sync.plan-coverage", "'w'", "rollout rank 0", *named):
        check_coverage(plan_of(*ops), {0: [PARAM]})


def test_a_parameter_that_the_rank_does_not_hold_is_named():
    with raises("sync.plan-extra-parameter", "'v'", "rollout rank 0"):
        check_coverage(plan_of(op((0, 0), (3, 6)), op((0,), (1,), param="v")), {0: [PARAM]})


def test_only_requested_ranks_are_checked():
    check_coverage(plan_of(op((0, 0), (3, 6)), op((0, 0), (9, 9), rank=1)), {0: [PARAM]})


@settings(max_examples=30)
@given(plan_cases(), st.data())
def test_a_plan_with_a_lost_repeated_or_shifted_op_is_refused(case, data):
    plan = build_plan(case.weight_map, case.train, case.rollout, 300, 2, case.placement)
    params = {rank: rollout_params(case, rank) for rank in range(case.rollout.world_size)}
    check_coverage(plan, params)
    ops = [m for rank in params for bucket in plan.received_by(rank) for m in bucket.ops]
    index = data.draw(st.integers(0, len(ops) - 1))
    victim = ops[index]
    shifted = victim._replace(dst_start=(victim.dst_start[0] + 1, *victim.dst_start[1:]))
    for damage in ([], [victim, victim], [shifted]):
        damaged = plan_of(*ops[:index], *damage, *ops[index + 1 :])
        with raises("sync.plan-coverage", f"'{victim.dst_param}'"):
            check_coverage(damaged, params)


def test_a_plan_for_another_model_is_refused():
    plan = build_plan(weight_map_of(layers=2), ParallelLayout(), RolloutLayout(), 1 << 20, 4)
    with raises("sync.plan-coverage", "'model.layers.2."):
        check_coverage(plan, {0: weight_map_of(layers=3).rollout_params(1, 0)})


FLOAT32 = torch.float32


def shares_of_both(weight_map, train, tp, replicas, train_tensors, engine_tensors, dtype=FLOAT32):
    exported = [weight_map.export_params(train, rank) for rank in range(train.world_size)]
    held = [weight_map.rollout_params(tp, rank % tp) for rank in range(tp * replicas)]
    return (
        [
            partial_checksums(p, t, dtype, frozenset(), convert=True)
            for p, t in zip(exported, train_tensors, strict=True)
        ],
        [partial_checksums(p, t, dtype, frozenset(), convert=False) for p, t in zip(held, engine_tensors, strict=True)],
    )


@settings(max_examples=15)
@given(cases())
def test_equal_weights_have_equal_checksums_in_any_two_layouts(case):
    weight_map, train, tp, replicas = case
    checkpoint = labelled_checkpoint(weight_map, FLOAT32)
    engines = rollout_tensors(weight_map, tp, replicas, checkpoint)
    compare_checksums(*shares_of_both(*case, training_tensors(weight_map, train, checkpoint), engines), tp)


@pytest.fixture
def sides():
    weight_map, train = weight_map_of(), ParallelLayout(2, 2, 2)
    checkpoint = labelled_checkpoint(weight_map, FLOAT32)
    engines = rollout_tensors(weight_map, 2, 2, checkpoint)
    return weight_map, training_tensors(weight_map, train, checkpoint), engines


def check(sides, dtype=FLOAT32):
    weight_map, train, engines = sides
    compare_checksums(*shares_of_both(weight_map, ParallelLayout(2, 2, 2), 2, 2, train, engines, dtype), 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda w: w[0, 1].add_(1),
        lambda w: w.copy_(w.flip(0)),  # the right values in wrong rows
        lambda w: w.copy_(w.flip(1)),
        lambda w: w[:2].copy_(w[:2].clone() * -1),  # one bit of each
    ],
)
def test_the_first_differing_tensor_is_named(sides, damage):
    check(sides)
    damage(sides[2][3]["model.layers.1.mlp.down_proj.weight"])
    with raises("sync.checksum-differs", "'model.layers.1.mlp.down_proj.weight' of rollout replica 1 (rank 2"):
        check(sides)
    sides[2][3]["model.layers.0.self_attn.qkv_proj.weight"][0] += 1
    with raises("sync.checksum-differs", "'model.layers.0.self_attn.q_proj.weight' of rollout replica 1"):
        check(sides)


def test_a_differing_copy_on_one_rank_is_detected(sides):
    sides[2][1]["model.norm.weight"][0] += 1  # both ranks of a replica hold it
    with raises("sync.checksum-differs", "'model.norm.weight' of rollout replica 0 (rank 0 to 1)"):
        check(sides)


def test_checksums_are_of_the_sent_dtype(sides):
    weight_map, train, engines = sides
    engines = [{name: t.bfloat16() for name, t in rank.items()} for rank in engines]
    check((weight_map, train, engines), torch.bfloat16)
    with raises("sync.verify-dtype", torch.bfloat16, FLOAT32):
        check((weight_map, train, engines))


def test_missing_and_unknown_tensors_are_named():
    whole = [{"w": PartialChecksum(5, 10)}]
    compare_checksums(whole, [{"w": PartialChecksum(5, 10)}, {"w": PartialChecksum(10, 20)}], 1)
    for held, code, named in (
        ({}, "sync.element-count", "0 elements of 'w', the actor 10"),
        ({"w": PartialChecksum(5, 15)}, "sync.element-count", "15 elements of 'w', the actor 10"),
        ({"w": PartialChecksum(5, 10), "v": PartialChecksum(0, 1)}, "sync.extra-parameter", "'v'"),
    ):
        with raises(code, named):
            compare_checksums(whole, [held], 1)
