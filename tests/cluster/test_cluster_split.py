import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.split import collect, plan_split, row_costs, seqlen_metrics, split
from megarl.data import DataProto
from megarl.errors import DataError

COSTS = [7, 1, 9, 3, 3, 8, 2, 6, 5, 5, 1, 4]


def batch_of(rows, **meta):
    return DataProto.from_dict({"tokens": torch.arange(rows) * 10}, {"uid": [f"u{row}" for row in range(rows)]}, meta)


def test_costs_are_real_tokens():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [0, 0, 1, 0]])
    tensors = {
        "prompts": torch.zeros(3, 2, dtype=torch.long),
        "responses": torch.zeros(3, 2, dtype=torch.long),
        "attention_mask": mask,
    }
    assert row_costs(DataProto.from_dict(tensors)) == [3, 3, 1]
    assert row_costs(batch_of(2)) == [1, 1]


def test_prompts_that_are_still_to_be_answered_cost_the_same():
    tensors = {
        "prompts": torch.zeros(3, 4, dtype=torch.long),
        "attention_mask": torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
    }
    assert row_costs(DataProto.from_dict(tensors)) == [1, 1, 1]


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    dp=st.integers(1, 6),
    copies=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_split_then_collect_is_the_identity(costs, dp, copies):
    batch = batch_of(len(costs), temperature=0.5)
    plan = plan_split(costs, dp)
    assert len(plan) == dp
    assert all(plan), "no rank is left out, or it would miss a collective call"
    answers = []
    for rank, chunk in enumerate(split(batch, plan)):
        assert chunk.meta_info == {"temperature": 0.5}
        tokens = chunk.batch["tokens"].repeat_interleave(copies) + torch.arange(copies).repeat(len(chunk))
        names = [uid for uid in chunk.non_tensor_batch["uid"] for _ in range(copies)]
        answers.append(DataProto.from_dict({"out": tokens}, {"name": names}, {"rank": rank}))
    joined = collect(answers, plan)
    expected = [10 * row + copy for row in range(len(costs)) for copy in range(copies)]
    assert joined.batch["out"].tolist() == expected
    assert joined.non_tensor_batch["name"].tolist() == [f"u{row}" for row in range(len(costs)) for _ in range(copies)]
    assert joined.meta_info == {"rank": 0}


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_mini_batches_hold_the_same_rows_whatever_dp_is(dp):
    plan = plan_split(COSTS, dp, mini_batch_rows=4, equal=True)
    share = 4 // dp
    for index in range(3):
        rows = list(itertools.chain.from_iterable(rank[index * share : (index + 1) * share] for rank in plan))
        assert sorted(rows) == [4 * index, 4 * index + 1, 4 * index + 2, 4 * index + 3]


def test_equal_split_without_mini_batches_gives_equal_counts_and_balanced_costs():
    plan = plan_split([9, 9, 1, 1, 1, 1, 9, 9], 2, equal=True)
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(8))
    costs = [9, 9, 1, 1, 1, 1, 9, 9]
    assert [len(rows) for rows in plan] == [4, 4]
    assert [sum(costs[row] for row in rows) for rows in plan] == [20, 20]


def test_unequal_counts_where_only_the_cost_matters():
    plan = plan_split([100, 1, 1, 1, 1, 1], 2)
    assert sorted(map(len, plan)) == [1, 5]


@pytest.mark.parametrize(
    ("rows", "mini_batch_rows", "dp", "message"),
    [
        (12, 5, 1, "mini-batches of 5 rows do not divide a batch of 12 rows"),
        (12, 6, 4, "a mini-batch of 6 rows does not divide over 4 data-parallel ranks"),
        (12, 0, 2, "mini-batches of 0 rows"),
        (5, None, 2, "a mini-batch of 5 rows does not divide over 2"),
        (0, None, 2, "a batch of 0 rows"),
    ],
)
def test_rows_that_do_not_divide_are_refused(rows, mini_batch_rows, dp, message):
    with pytest.raises(DataError, match=message):
        plan_split([1] * rows, dp, mini_batch_rows, equal=True)


def test_batches_of_one_call_must_agree_in_rows():
    with pytest.raises(DataError, match="must have the same rows: 3, expected 4"):
        split(batch_of(3), [[0, 3], [1, 2]])


def test_results_that_do_not_fit_are_refused():
    plan = [[0, 2], [1, 3]]
    with pytest.raises(DataError, match="DP rank 1 returned 1 rows for a chunk of 2"):
        collect([batch_of(2), batch_of(1)], plan)
    with pytest.raises(DataError, match="different kinds"):
        collect([batch_of(2), {"loss": 1.0}], plan)


def test_metrics_and_none_come_from_the_first_rank():
    assert collect([{"loss": 1.0}, {"loss": 1.0}], [[0], [1]]) == {"loss": 1.0}
    assert collect([None, None], [[0], [1]]) is None


def test_responses_of_different_widths_are_joined():
    parts = [DataProto.from_dict({"rollout_log_probs": torch.full((1, width), -1.0)}) for width in (2, 3)]
    joined = collect(parts, [[1], [0]])
    assert joined.batch["rollout_log_probs"].tolist() == [[-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0]]


def test_sequence_length_metrics():
    metrics = seqlen_metrics([10, 20, 30, 40], [[0, 3], [1, 2]])
    assert metrics == {
        "global_seqlen/min": 30.0,
        "global_seqlen/max": 70.0,
        "global_seqlen/minmax_diff": 40.0,
        "global_seqlen/balanced_min": 50.0,
        "global_seqlen/balanced_max": 50.0,
        "global_seqlen/mean": 50.0,
    }
