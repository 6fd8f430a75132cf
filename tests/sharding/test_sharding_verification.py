import pytest
import torch
from hypothesis import given, settings
from resharding_cases import cases, labelled_checkpoint, rollout_tensors, training_tensors, weight_map_of

from megarl.errors import WeightSyncError
from megarl.models import ParallelLayout
from megarl.sharding.verification import Share, check_shares, shares_of

FLOAT32 = torch.float32


def shares_of_both(weight_map, train, tp, replicas, train_tensors, engine_tensors, dtype=FLOAT32):
    exported = [weight_map.export_params(train, rank) for rank in range(train.world_size)]
    held = [weight_map.rollout_params(tp, rank % tp) for rank in range(tp * replicas)]
    return (
        [shares_of(p, t, dtype, frozenset(), convert=True) for p, t in zip(exported, train_tensors, strict=True)],
        [shares_of(p, t, dtype, frozenset(), convert=False) for p, t in zip(held, engine_tensors, strict=True)],
    )


@settings(max_examples=15)
@given(cases())
def test_equal_weights_agree_in_every_two_layouts(case):
    weight_map, train, tp, replicas = case
    checkpoint = labelled_checkpoint(weight_map, FLOAT32)
    engines = rollout_tensors(weight_map, tp, replicas, checkpoint)
    check_shares(*shares_of_both(*case, training_tensors(weight_map, train, checkpoint), engines), tp)


@pytest.fixture()
def sides():
    weight_map, train = weight_map_of(), ParallelLayout(2, 2, 2)
    checkpoint = labelled_checkpoint(weight_map, FLOAT32)
    engines = rollout_tensors(weight_map, 2, 2, checkpoint)
    return weight_map, training_tensors(weight_map, train, checkpoint), engines


def check(sides, dtype=FLOAT32):
    weight_map, train, engines = sides
    check_shares(*shares_of_both(weight_map, ParallelLayout(2, 2, 2), 2, 2, train, engines, dtype), 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda w: w[0, 1].add_(1),
        lambda w: w.copy_(w.flip(0)),  # the right values in wrong rows
        lambda w: w.copy_(w.flip(1)),
        lambda w: w[:2].copy_(w[:2].clone() * -1),  # one bit of each
    ],
)
def test_the_first_tensor_that_differs_is_named(sides, damage):
    check(sides)
    damage(sides[2][3]["model.layers.1.mlp.down_proj.weight"])
    with pytest.raises(
        WeightSyncError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' of rollout replica 1 \(rank 2"
    ):
        check(sides)
    sides[2][3]["model.layers.0.self_attn.qkv_proj.weight"][0] += 1
    with pytest.raises(WeightSyncError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight' of rollout replica 1"):
        check(sides)


def test_a_copy_on_one_rank_that_differs_is_seen(sides):
    sides[2][1]["model.norm.weight"][0] += 1  # both ranks of a replica hold it
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' of rollout replica 0 \(rank 0 to 1\) differs"):
        check(sides)


def test_what_is_sent_is_compared_not_what_it_was_made_of(sides):
    weight_map, train, engines = sides
    engines = [{name: t.bfloat16() for name, t in rank.items()} for rank in engines]
    check((weight_map, train, engines), torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"is torch\.bfloat16 and was sent as torch\.float32"):
        check((weight_map, train, engines))


def test_what_is_missing_or_unknown_is_named():
    whole = [{"w": Share(5, 10)}]
    check_shares(whole, [{"w": Share(5, 10)}, {"w": Share(10, 20)}], 1)
    for held, message in (
        ({}, "holds 0 elements of 'w', the actor 10"),
        ({"w": Share(5, 15)}, "holds 15 elements of 'w', the actor 10"),
        ({"w": Share(5, 10), "v": Share(0, 1)}, "holds 'v', which the actor does not"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            check_shares(whole, [held], 1)
