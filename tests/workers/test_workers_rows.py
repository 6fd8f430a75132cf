"""Packing of padded rows into micro-batches, and unpacking."""

import pytest
import torch
from support.expected_errors import raises
from tiny_policies import ROW_LENGTHS, answers, rows_of

from megarl.workers.rows import PackedRows
from megarl.workers.settings import MicroBatchBudget


def numbered():
    batch = answers()
    return batch.with_columns({"values": torch.arange(64.0).view(8, 8) + 1}, {})


@pytest.mark.parametrize("rows", [[0], [3, 1], [7, 6, 5, 4, 3, 2, 1, 0]])
def test_micro_batch_has_the_rows_without_padding(rows):
    batch, plain = numbered(), rows_of(numbered())
    packed = PackedRows(batch)
    micro_batch = packed.pack(rows, {"values": packed.column("values", rows)})
    assert micro_batch.num_tokens == sum(sum(ROW_LENGTHS[row]) for row in rows)
    assert micro_batch.targets.tolist() == [token for row in rows for token in plain[row].response.tolist()]
    assert micro_batch.columns["values"].tolist() == [v for row in rows for v in plain[row].columns["values"].tolist()]
    # Each response token is predicted at the token before it.
    before = [([*plain[row].prompt.tolist(), *plain[row].response.tolist()], len(plain[row].prompt)) for row in rows]
    expected = [token for ids, prompt in before for token in ids[prompt - 1 : -1]]
    assert micro_batch.tokens[micro_batch.read_at].tolist() == expected


@pytest.mark.parametrize("budget", [MicroBatchBudget(size=3), MicroBatchBudget(max_tokens=17)])
@pytest.mark.parametrize("rows", [None, [6, 2, 4, 1]])
def test_micro_batches_hold_each_row_once_within_the_budget(budget, rows):
    groups = PackedRows(numbered()).micro_batches(budget, rows)
    assert sorted(row for group in groups for row in group) == sorted(rows or range(8))
    for group in groups:
        assert len(group) <= (budget.size or 8)
        assert sum(sum(ROW_LENGTHS[row]) for row in group) <= (budget.max_tokens or 1000)


def test_unpacked_values_return_to_their_positions():
    packed = PackedRows(numbered())
    groups = [[5, 0], [7], [2, 1, 6], [3, 4]]
    unpacked = packed.unpack(groups, [packed.column("values", group) for group in groups])
    assert unpacked.dtype == torch.float32
    assert unpacked.tolist() == [
        row * 8 + i + 1.0 for row, (_, response) in enumerate(ROW_LENGTHS) for i in range(response)
    ]


def test_unpacked_values_are_float32():
    packed = PackedRows(numbered())
    values = packed.column("values", range(8)).bfloat16()
    assert packed.unpack([list(range(8))], [values]).dtype == torch.float32


def test_row_longer_than_the_budget_raises():
    with raises("batch.micro-batch-tokens", "row=1", 9, 8):
        PackedRows(numbered()).micro_batches(MicroBatchBudget(max_tokens=8))


@pytest.mark.parametrize(("budget", "others", "count"), [("max_tokens", 5, 5), ("size", 3, 3), ("multiple", 1, 4)])
def test_number_of_micro_batches_equals_other_ranks(budget, others, count):
    limits = {"max_tokens": MicroBatchBudget(max_tokens=60), "size": MicroBatchBudget(size=8)}
    limits["multiple"] = MicroBatchBudget(max_tokens=60, multiple=4)
    groups = PackedRows(numbered()).micro_batches(limits[budget], gather_counts=lambda mine: [mine, others])
    assert len(groups) == count and all(groups)
    assert sorted(row for group in groups for row in group) == list(range(8))
