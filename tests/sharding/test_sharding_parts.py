"""A rank's part of a plan says what the plan says of it, whoever it is, and of nobody else."""

import pickle

import pytest
from hypothesis import given, settings
from plan_cases import plan_cases, rollout_params
from resharding_cases import weight_map_of

from megarl.models import ParallelLayout
from megarl.sharding import RolloutLayout, build_plan, check_coverage, receiver_parts, sender_parts


@settings(max_examples=40)
@given(plan_cases())
def test_a_part_has_the_moves_of_its_rank(case):
    plan = build_plan(case.weight_map, case.train, case.rollout, 300, 2, case.placement)
    senders, receivers = list(sender_parts(plan, case.train.world_size)), list(receiver_parts(plan))
    assert len(senders) == case.train.world_size and len(receivers) == case.rollout.world_size
    for rank, part in enumerate(senders):
        assert part.sent_by(rank) == plan.sent_by(rank)
    for rank, part in enumerate(receivers):
        assert part.received_by(rank) == plan.received_by(rank)
        check_coverage(part, {rank: rollout_params(case, rank)})
    assert all(part.float32_params == plan.float32_params for part in (*senders, *receivers))


def test_a_part_is_of_one_rank_and_small():
    plan = build_plan(weight_map_of(layers=32), ParallelLayout(tp=2, pp=8), RolloutLayout(tp=2, replicas=32), 1000, 2)
    sender, receiver = next(sender_parts(plan, 16)), next(receiver_parts(plan))
    with pytest.raises(ValueError, match="this is training rank 0's part of the plan, not training rank 1's"):
        sender.sent_by(1)
    with pytest.raises(ValueError, match="this is rollout rank 0's part of the plan, not training rank 0's"):
        receiver.sent_by(0)
    whole = len(pickle.dumps(plan))
    assert all(len(pickle.dumps(part)) < whole / 5 for part in (*sender_parts(plan, 16), *receiver_parts(plan)))
