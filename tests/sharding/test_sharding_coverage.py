import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import ListedPlan, plan_cases, rollout_params
from resharding_cases import weight_map_of

from megarl.errors import WeightSyncError
from megarl.models import LocalParam, ParallelLayout, Piece
from megarl.sharding import Bucket, Move, RolloutLayout, build_plan, check_coverage


def plan_of(*moves):
    return ListedPlan((Bucket(tuple(moves), 0),))


def move(start, shape, param="w", rank=0):
    return Move(0, "src", rank, param, (0,) * len(shape), start, shape)


PARAM = LocalParam("w", (4, 6), (Piece("hf", (0, 0), (3, 6), (0, 0)),))  # the last row is padding


def test_any_exact_tiling_passes():
    check_coverage(plan_of(move((0, 0), (3, 6))), {0: [PARAM]})
    check_coverage(plan_of(move((0, 0), (3, 2)), move((0, 2), (1, 4)), move((1, 2), (2, 4))), {0: [PARAM]})


@pytest.mark.parametrize(
    "moves,message",
    [
        ([], r"elements \[0, 0\] to \[3, 6\] of parameter 'w' on rollout rank 0 0 times instead of 1"),
        ([move((0, 0), (2, 6))], r"elements \[2, 0\] to \[3, 6\] of parameter 'w' on rollout rank 0 0 times"),
        ([move((0, 0), (3, 6)), move((1, 1), (1, 2))], r"\[1, 1\] to \[2, 3\] of parameter 'w'.* 2 times instead of 1"),
        ([move((0, 0), (4, 6))], r"\[3, 0\] to \[4, 6\] of parameter 'w'.* 1 times instead of 0"),
        ([move((0, 0), (3, 6)), move((0,), (1,), param="v")], "'v' to rollout rank 0, which does not hold it"),
        # Right in number, wrong in place.
        ([move((0, 0), (2, 6)), move((1, 0), (1, 6))], r"\[1, 0\] to \[2, 6\] .* 2 times instead of 1"),
    ],
)
def test_what_is_wrong_is_named(moves, message):
    with pytest.raises(WeightSyncError, match=message):
        check_coverage(plan_of(*moves), {0: [PARAM]})


def test_ranks_that_are_not_asked_for_are_not_checked():
    check_coverage(plan_of(move((0, 0), (3, 6)), move((0, 0), (9, 9), rank=1)), {0: [PARAM]})


@settings(max_examples=30)
@given(plan_cases(), st.data())
def test_a_plan_that_loses_repeats_or_shifts_a_move_is_refused(case, data):
    plan = build_plan(case.weight_map, case.train, case.rollout, 300, 2, case.placement)
    params = {rank: rollout_params(case, rank) for rank in range(case.rollout.world_size)}
    check_coverage(plan, params)
    moves = [m for rank in params for bucket in plan.received_by(rank) for m in bucket.moves]
    index = data.draw(st.integers(0, len(moves) - 1))
    victim = moves[index]
    shifted = victim._replace(dst_start=(victim.dst_start[0] + 1, *victim.dst_start[1:]))
    for damage in ([], [victim, victim], [shifted]):
        damaged = plan_of(*moves[:index], *damage, *moves[index + 1 :])
        with pytest.raises(WeightSyncError, match=victim.dst_param.replace(".", r"\.")):
            check_coverage(damaged, params)


def test_a_plan_for_another_model_is_refused():
    plan = build_plan(weight_map_of(layers=2), ParallelLayout(), RolloutLayout(), 1 << 20, 4)
    with pytest.raises(WeightSyncError, match=r"model\.layers\.2\."):
        check_coverage(plan, {0: weight_map_of(layers=3).rollout_params(1, 0)})
