import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.cluster.partition import (
    Partition,
    partition_costs,
    partition_groups,
    partition_rows,
    row_costs,
    seqlen_metrics,
)
from megarl.data import DataProto, fewest_micro_batches, plan_micro_batches, token_counts
from megarl.data.ragged import ChunkReference
from megarl.data.remote_columns import write_values
from megarl.models.sequence_cost import SequenceCost
from megarl.workers.dispatch import UPDATE_ROWS
from megarl.workers.settings import MicroBatchBudget

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
    assert row_costs(DataProto.from_dict(tensors), SequenceCost(10, 2)) == [48, 48, 12]
    assert row_costs(DataProto.from_dict(tensors, meta_info={"balance_batch": False})) == [1, 1, 1]
    assert row_costs(batch_of(2)) == [1, 1]


def test_prompts_without_responses_have_equal_costs():
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
@settings(max_examples=60)
def test_split_then_collect_is_the_identity(costs, dp, copies):
    batch = batch_of(len(costs), temperature=0.5)
    partition = partition_costs(costs, dp)
    assert len(partition.rows) == dp
    assert all(partition.rows), "no rank is left out, or it would miss a collective call"
    answers = []
    for rank, chunk in enumerate(partition.split(batch)):
        assert chunk.meta_info == {"temperature": 0.5}
        tokens = chunk.batch["tokens"].repeat_interleave(copies) + torch.arange(copies).repeat(len(chunk))
        names = [uid for uid in chunk.non_tensor_batch["uid"] for _ in range(copies)]
        answers.append(DataProto.from_dict({"out": tokens}, {"name": names}, {"rank": rank}))
    joined = partition.collect(answers)
    expected = [10 * row + copy for row in range(len(costs)) for copy in range(copies)]
    assert joined.batch["out"].tolist() == expected
    assert joined.non_tensor_batch["name"].tolist() == [f"u{row}" for row in range(len(costs)) for _ in range(copies)]
    assert joined.meta_info == {"rank": 0}


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_mini_batch_rows_do_not_depend_on_dp(dp):
    plan = partition_costs(COSTS, dp, mini_batch_rows=4, equal=True).rows
    share = 4 // dp
    for index in range(3):
        rows = list(itertools.chain.from_iterable(rank[index * share : (index + 1) * share] for rank in plan))
        assert sorted(rows) == [4 * index, 4 * index + 1, 4 * index + 2, 4 * index + 3]


def test_equal_split_without_mini_batches_gives_equal_counts_and_balanced_costs():
    plan = partition_costs([9, 9, 1, 1, 1, 1, 9, 9], 2, equal=True).rows
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(8))
    costs = [9, 9, 1, 1, 1, 1, 9, 9]
    assert [len(rows) for rows in plan] == [4, 4]
    assert [sum(costs[row] for row in rows) for rows in plan] == [20, 20]


def test_unequal_counts_balance_the_cost():
    plan = partition_costs([100, 1, 1, 1, 1, 1], 2).rows
    assert sorted(map(len, plan)) == [1, 5]


@pytest.mark.parametrize(
    ("rows", "mini_batch_rows", "dp", "code", "values"),
    [
        (12, 5, 1, "batch.mini-batch-rows", ["5 rows", "12 rows"]),
        (12, 6, 4, "batch.mini-batch-ranks", ["6 rows", "4 DP ranks"]),
        (12, 0, 2, "batch.mini-batch-rows", ["0 rows"]),
        (5, None, 2, "batch.mini-batch-ranks", ["5 rows", "2 DP ranks"]),
        (0, None, 2, "batch.no-rows", ["0 rows"]),
    ],
)
def test_rows_that_do_not_divide_raise(rows, mini_batch_rows, dp, code, values):
    with raises(code, *values):
        partition_costs([1] * rows, dp, mini_batch_rows, equal=True)


def test_batches_of_one_call_need_the_same_rows():
    with raises("batch.different-rows", "4 and 3 rows"):
        Partition([[0, 3], [1, 2]]).split(batch_of(3))


def test_results_that_do_not_fit_raise():
    partition = Partition([[0, 2], [1, 3]])
    with raises("worker.result-rows", "DP rank 1", "1 rows", "its 2"):
        partition.collect([batch_of(2), batch_of(1)])
    with raises("worker.result-types", "['DataProto', 'dict']"):
        partition.collect([batch_of(2), {"loss": 1.0}])


def test_metrics_and_none_come_from_the_first_rank():
    partition = Partition([[0], [1]])
    assert partition.collect([{"loss": 1.0}, {"loss": 1.0}]) == {"loss": 1.0}
    assert partition.collect([None, None]) is None


def test_responses_of_different_widths_are_joined():
    parts = [DataProto.from_dict({"rollout_log_probs": torch.full((1, width), -1.0)}) for width in (2, 3)]
    joined = Partition([[1], [0]]).collect(parts)
    assert joined.batch["rollout_log_probs"].tolist() == [[-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0]]


def answered(lengths, **meta):
    """Rows with responses of the given numbers of tokens."""
    width = max(lengths)
    mask = torch.arange(width + 1) < torch.tensor(lengths)[:, None]
    tensors = {
        "prompts": torch.zeros(len(lengths), 1, dtype=torch.long),
        "responses": torch.zeros(len(lengths), width, dtype=torch.long),
        "attention_mask": mask.long(),
    }
    return DataProto.from_dict(tensors, {"uid": [f"u{row}" for row in range(len(lengths))]}, meta)


SKEWED = [40, 3, 3, 3, 2, 2, 2, 1, 9, 9, 9, 9, 9, 9, 9, 9]  # two mini-batches of 8


def test_token_budget_allows_unequal_counts():
    partition = partition_rows(answered(SKEWED), 2, 8, equal=True, budget=MicroBatchBudget(max_tokens=40))
    assert partition.mini_batch_sizes == [[1, 4], [7, 4]]
    for rank, sizes in enumerate(([1, 4], [7, 4])):
        assert partition.split(answered(SKEWED))[rank].meta_info == {"mini_batch_sizes": sizes}
    assert sorted(partition.rows[0] + partition.rows[1]) == list(range(16))


@pytest.mark.parametrize(
    "budget",
    [
        MicroBatchBudget(size=2),
        MicroBatchBudget(max_tokens=40, multiple=2),  # the rank with one row could not make two micro-batches
    ],
)
def test_counts_are_equal_if_micro_batches_require_it(budget):
    assert partition_rows(answered(SKEWED), 2, 8, budget=budget).mini_batch_sizes == [[4, 4], [4, 4]]


def test_work_is_balanced_by_the_cost_of_the_model():
    quadratic = MicroBatchBudget(max_tokens=100, cost=SequenceCost(0, 1))
    lengths = [6, 3, 3, 3, 3]
    partition = partition_rows(answered(lengths), 2, budget=quadratic)
    assert [sorted(lengths[row] for row in rows) for rows in partition.rows] == [[6], [3, 3, 3, 3]]
    plain = partition_rows(answered(lengths), 2, budget=MicroBatchBudget(max_tokens=100)).rows
    assert sorted(map(len, plain)) == [2, 3]


LENGTHS = [9, 2, 7, 3, 1, 4, 8, 2, 6, 5, 3, 9, 2, 2, 30, 1, 4, 4, 6, 7, 9, 1, 1, 5]  # three mini-batches of 8


class Written(ChunkReference):
    """A chunk that nobody reads."""

    @classmethod
    def fetch(cls, references):
        raise AssertionError


@pytest.mark.parametrize("budget", [None, MicroBatchBudget(max_tokens=40), MicroBatchBudget(size=2)])
def test_passes_and_update_read_the_same_chunk(budget):
    batch = answered(LENGTHS, **{UPDATE_ROWS: 8})
    passes = partition_rows(batch, 4, budget=budget)
    stored = write_values(batch, passes.rows, lambda chunk: Written())
    update = partition_rows(stored, 4, 8, equal=True, budget=budget)
    for partition in (passes, update):
        for part in partition.split(stored):
            assert len(part.tensors.stored["responses"].values.places.compact().references) == 1
    assert passes.mini_batch_rows is None and update.mini_batch_rows == 8


@pytest.mark.parametrize(
    ("rows", "dp", "budget"),
    [
        (10, 2, MicroBatchBudget(max_tokens=40)),  # the batch is not whole mini-batches, as after a selection
        (8, 3, MicroBatchBudget(max_tokens=40)),  # a reference with another number of ranks
    ],
)
def test_passes_whose_ranks_cannot_have_the_updates_rows(rows, dp, budget):
    plain = partition_rows(answered(LENGTHS), dp, budget=budget)
    assert partition_rows(answered(LENGTHS, **{UPDATE_ROWS: rows}), dp, budget=budget) == plain


def test_ranks_have_even_work_over_the_mini_batches():
    lengths = [9, 1, 9, 1, 9, 1, 9, 1]  # mini-batches of a long row and a short one
    for budget in (None, MicroBatchBudget(max_tokens=20)):
        tokens, _ = partition_rows(answered(lengths), 2, 2, equal=True, budget=budget).loads(lengths, lengths)
        assert tokens == [20, 20]


def siblings(prompts, responses, copies):
    """Rows with prompts of the given lengths, each with ``copies`` consecutive responses."""
    width, rows = max(prompts), [(p, r) for p in range(len(prompts)) for r in responses[p * copies : (p + 1) * copies]]
    real = torch.tensor([[n >= width - prompts[p] for n in range(width)] for p, _ in rows])
    answered = torch.arange(max(responses)) < torch.tensor([r for _, r in rows])[:, None]
    tensors = {
        "prompts": torch.tensor([[p + 1] * width for p, _ in rows]) * real,
        "responses": torch.ones(len(rows), max(responses), dtype=torch.long),
        "attention_mask": torch.cat([real, answered], dim=1).long(),
    }
    return DataProto.from_dict(tensors)


def test_samples_of_one_prompt_share_a_rank_if_that_is_less_work():
    share = MicroBatchBudget(max_tokens=100, share_prompts=True)
    batch = siblings([30, 30, 30, 30], [2, 9, 3, 8, 4, 7, 5, 6], copies=2)
    for budget in (share, MicroBatchBudget(size=2, share_prompts=True)):
        for rows in partition_rows(batch, 2, budget=budget).rows:
            assert [row // 2 for row in rows[::2]] == [row // 2 for row in rows[1::2]]
            assert len(rows) == 4
    # One prompt has all the work: apart, its two answers take each rank 71 tokens, together one rank takes 131.
    batch = siblings([1, 1, 1, 1], [65, 65, 1, 1, 1, 1, 1, 1], copies=2)
    plan = partition_rows(batch, 2, budget=share).rows
    assert {row < 2 for row in plan[0]} == {row < 2 for row in plan[1]} == {True, False}


def test_groups_stay_whole_on_ranks_with_nearly_equal_tokens():
    lengths = [9, 2, 7, 3, 1, 4, 9, 2, 6, 5]
    batch, uids = answered(lengths), np.array(["a", "b", "c", "a", "b", "c", "d", "d", "e", "e"], dtype=object)
    plan = partition_groups(batch, 3, uids).rows
    assert sorted(row for rows in plan for row in rows) == [*range(10)]
    assert all(rows == sorted(rows) for rows in plan)
    ranks = [{uids[row] for row in rows} for rows in plan]
    assert sum(map(len, ranks)) == 5, "no group is on two ranks"
    tokens = [sum(token_counts(batch)[row] for row in rows) for rows in plan]
    assert max(tokens) - min(tokens) <= 14, tokens
    assert [len(rows) for rows in partition_groups(batch, 64, uids).rows] == [2] * 5, "further ranks have no rows"


def test_row_longer_than_the_budget_raises_before_the_call():
    with raises("batch.micro-batch-tokens", "row 2 (uid=u2)", "9 tokens", "8", "max_token_len_per_gpu"):
        partition_rows(answered([4, 8, 9]), 2, budget=MicroBatchBudget(max_tokens=8))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=12, max_size=12),
    dp=st.sampled_from([1, 2, 3]),
    multiple=st.sampled_from([1, 2]),
)
@settings(max_examples=40)
def test_every_rank_has_rows_for_the_common_number_of_micro_batches(lengths, dp, multiple):
    budget = MicroBatchBudget(max_tokens=60, multiple=multiple)
    partition = partition_rows(answered(lengths), dp, 6, equal=True, budget=budget)
    for mini_batch, cut in enumerate(partition.mini_batches):
        assert [len(rows) for rows in cut] == [sizes[mini_batch] for sizes in partition.mini_batch_sizes]
        assert sorted(itertools.chain(*cut)) == list(range(6 * mini_batch, 6 * mini_batch + 6))
        needed = [fewest_micro_batches([lengths[row] for row in rows], max_tokens=60) for rows in cut]
        for rows in cut:
            plan_micro_batches(
                [lengths[row] for row in rows], max_tokens=60, count=-(-max(needed) // multiple) * multiple
            )


def test_sequence_length_metrics():
    lengths = [10, 20, 30, 40]
    metrics = seqlen_metrics(lengths, [100, 400, 900, 1600], Partition([[0, 3], [1, 2]]))
    assert metrics == {
        "global_seqlen/min": 30.0,
        "global_seqlen/max": 70.0,
        "global_seqlen/minmax_diff": 40.0,
        "global_seqlen/balanced_min": 50.0,
        "global_seqlen/balanced_max": 50.0,
        "global_seqlen/mean": 50.0,
        "global_seqlen/imbalance": 2500 / 1500,
        "global_seqlen/balanced_imbalance": 1700 / 1500,
    }


def test_imbalance_is_measured_per_mini_batch():
    metrics = seqlen_metrics([1, 3, 3, 1], [1, 3, 3, 1], Partition([[0, 2], [1, 3]], 2))
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/mean"] == 4
    assert metrics["global_seqlen/imbalance"] == metrics["global_seqlen/balanced_imbalance"] == 6 / 4


def test_rank_loads_are_tokens_and_relative_work():
    tokens, work = Partition([[0, 3], [1, 2]]).loads([10, 20, 30, 40], [100, 400, 900, 1600])
    assert tokens == [50.0, 50.0] and work == [1700 / 1500, 1300 / 1500]


def test_a_batch_makes_one_partition_per_request():
    batch, budget = answered(SKEWED), MicroBatchBudget(max_tokens=40)
    first = partition_rows(batch, 2, budget=budget)
    scored = batch.with_columns({"values": torch.zeros(16, 40)}, {"score": [0.0] * 16})
    answers = DataProto.from_dict({"old_log_probs": torch.zeros(16, 40)})
    for later in (batch, scored, scored.union(answers), scored.select(["prompts", "responses", "attention_mask"])):
        assert partition_rows(later, 2, budget=budget) is first
    update = partition_rows(scored, 2, 8, equal=True, budget=budget)
    assert update is not first and partition_rows(batch, 2, 8, equal=True, budget=budget) is update
    assert len(batch.partitions) == 2


def test_other_rows_or_lengths_need_another_partition():
    batch, budget = answered(SKEWED), MicroBatchBudget(max_tokens=40)
    first = partition_rows(batch, 2, budget=budget)
    shorter = batch.with_columns({"attention_mask": answered([1] * 16 + [40]).batch["attention_mask"][:16]})
    plain = batch.select(["prompts", "responses", "attention_mask"], [], meta_info_keys=[])
    plain.meta_info["balance_batch"] = False
    for other in (batch[::-1], batch.repeat(2), batch.select([]), shorter, plain):
        assert partition_rows(other, 2, budget=budget) is not first
