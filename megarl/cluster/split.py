"""Rows to data-parallel ranks and back: pure functions of lengths, tested without a process.

A plan is a list with, per DP rank, the indices of the caller's rows that it gets, in the order in which it gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megarl.data import (
    DataProto,
    balance_mini_batches,
    balanced_partition,
    check_longest,
    common_count,
    fewest_micro_batches,
)
from megarl.data.shared_prompts import SharedPromptRows, plan_families
from megarl.errors import DataError
from megarl.models.sequence_cost import TOKENS, SequenceCost
from megarl.workers.dispatch import MINI_BATCH_SIZES
from megarl.workers.settings import MicroBatchBudget

Plan = list[list[int]]


def row_lengths(batch: DataProto) -> list[int] | None:
    """Real tokens of each row, by ``attention_mask`` ``[rows, P + R]``; None where there are no answers yet."""
    columns = batch.tensors
    if "attention_mask" not in columns or not {"responses", "rejected"} & columns.keys():
        return None
    return columns["attention_mask"].sum(-1).tolist()


def row_costs(batch: DataProto, cost: SequenceCost = TOKENS) -> list[float]:
    """Work per row, by the tokens that it has.

    Rows without ``responses`` have no length and cost 1 each; so does every row where ``meta_info["balance_batch"]`` is
    False.
    """
    lengths = row_lengths(batch)
    if lengths is None or not batch.meta_info.get("balance_batch", True):
        return [1.0] * len(batch)
    return cost.of(lengths)


def plan_rows(
    batch: DataProto,
    dp: int,
    mini_batch_rows: int | None = None,
    *,
    equal: bool = False,
    budget: MicroBatchBudget | None = None,
) -> Plan:
    """Assign a batch's rows to DP ranks so that every rank has about the same work.

    With a token budget, ranks get as many rows as make their work even; where some rank would then have fewer rows than
    the micro-batches that all ranks must make (see :func:`megarl.data.common_count`), all get equally many. With a
    fixed number of rows per micro-batch they always do. Where prompts are shared, rows of one prompt stay together if
    that leaves the busiest rank less to do.

    Args:
        batch: rows with their lengths.
        dp: number of DP ranks.
        mini_batch_rows: see :func:`plan_split`.
        equal: see :func:`plan_split`; counts may differ nevertheless where ``budget`` counts tokens.
        budget: how a rank will cut its rows into micro-batches; None: it will not.

    Raises:
        DataError: as :func:`plan_split`, or a row has more tokens than the budget.
    """
    lengths = row_lengths(batch)
    if budget is None or lengths is None:
        return plan_split(row_costs(batch), dp, mini_batch_rows, equal=equal)
    if budget.max_tokens is not None:
        uids = batch.non_tensor_batch.get("uid")
        check_longest(
            lengths, budget.max_tokens, lambda row: f"row {row}" + ("" if uids is None else f" (uid={uids[row]})")
        )
    plan = _plan_row_by_row(batch, lengths, dp, mini_batch_rows, budget)
    if budget.share_prompts and batch.meta_info.get("balance_batch", True):
        return _cheaper_with_families(batch, lengths, plan, mini_batch_rows, budget)
    return plan


def _plan_row_by_row(
    batch: DataProto, lengths: Sequence[int], dp: int, mini_batch_rows: int | None, budget: MicroBatchBudget
) -> Plan:
    costs = row_costs(batch, budget.cost)
    if budget.max_tokens is not None:
        plan = plan_split(costs, dp, mini_batch_rows)
        if _can_be_cut(lengths, plan, budget, mini_batch_rows):
            return plan
    return plan_split(costs, dp, mini_batch_rows, equal=True)


def _cheaper_with_families(
    batch: DataProto, lengths: Sequence[int], plan: Plan, mini_batch_rows: int | None, budget: MicroBatchBudget
) -> Plan:
    """``plan``, or one with rows of the same prompt on the same rank where its busiest ranks have less to do."""
    rows, size, by_tokens = SharedPromptRows.of(batch), mini_batch_rows or len(lengths), budget.max_tokens is not None
    together = plan_families(rows, budget.cost, len(plan), size, equal=not by_tokens)
    if together is None or (by_tokens and not _can_be_cut(lengths, together, budget, mini_batch_rows)):
        return plan

    def slowest(plan: Plan) -> float:
        cuts = zip(*_by_mini_batch(plan, size), strict=True)
        return sum(max(rows.cost(part, budget.cost) for part in parts) for parts in cuts)

    return min(plan, together, key=slowest)


def plan_split(costs: Sequence[float], dp: int, mini_batch_rows: int | None = None, *, equal: bool = False) -> Plan:
    """Assign rows to DP ranks so that every rank has about the same cost.

    Args:
        costs: work per row.
        dp: number of DP ranks.
        mini_batch_rows: rows per global mini-batch, which are consecutive rows of the caller's order whatever ``dp``
            is. Every rank gets a share of each, mini-batch after mini-batch. None: one for all.
        equal: every rank must get equally many rows of each mini-batch. Otherwise counts may differ; with fewer rows
            than ranks the idle ones get a copy of row 0, so that no rank misses a collective call.

    Raises:
        DataError: no rows, or rows that do not divide as asked.
    """
    if not costs:
        raise DataError("a batch of 0 rows cannot be split over data-parallel ranks; it needs at least 1")
    if not equal and mini_batch_rows is None:
        plan = balanced_partition(costs, min(dp, len(costs)), equal_size=False)
        return [sorted(rows) for rows in plan] + [[0]] * (dp - len(plan))
    size = len(costs) if mini_batch_rows is None else mini_batch_rows
    if size < 1 or len(costs) % size:
        raise DataError(f"mini-batches of {size} rows do not divide a batch of {len(costs)} rows")
    if size % dp:
        raise DataError(f"a mini-batch of {size} rows does not divide over {dp} data-parallel ranks")
    mini_batches = balance_mini_batches(costs, len(costs) // size, dp, equal)
    return [[row for parts in mini_batches for row in parts[rank]] for rank in range(dp)]


def mini_batch_sizes(plan: Plan, mini_batch_rows: int) -> list[list[int]]:
    """Rows of each mini-batch, which are ``mini_batch_rows`` consecutive rows of the caller's order, by DP rank."""
    count = 1 + max(map(max, plan)) // mini_batch_rows
    return [np.bincount(np.array(rows) // mini_batch_rows, minlength=count).tolist() for rows in plan]


def split(batch: DataProto, plan: Plan, mini_batch_rows: int | None = None) -> list[DataProto]:
    """The chunk of each DP rank; every chunk has the whole ``meta_info``.

    With ``mini_batch_rows``, it also says how many rows each mini-batch has on that rank, under
    :data:`megarl.workers.dispatch.MINI_BATCH_SIZES`.

    Raises:
        DataError: the plan was made for another number of rows.
    """
    rows = 1 + max(max(indices) for indices in plan)
    if rows != len(batch):
        raise DataError(f"all batches of one call must have the same rows: {len(batch)}, expected {rows}")
    chunks = [batch[np.asarray(indices, dtype=np.int64)] for indices in plan]
    if mini_batch_rows is not None:
        for chunk, sizes in zip(chunks, mini_batch_sizes(plan, mini_batch_rows), strict=True):
            chunk.meta_info = {**chunk.meta_info, MINI_BATCH_SIZES: sizes}
    return chunks


def collect(results: Sequence[Any], plan: Plan) -> Any:
    """Put the results of the DP ranks together in the caller's row order.

    Args:
        results: what the owner of each DP rank returned: a ``DataProto`` with the chunk's rows in the chunk's order,
            or with ``n`` consecutive rows for each of them; or a ``dict`` or None.
        plan: how the rows were split.

    Returns:
        For ``DataProto``: one with ``n`` rows per row of the caller and DP rank 0's ``meta_info``; otherwise DP rank
        0's result.

    Raises:
        DataError: the ranks returned different kinds, or counts of rows that do not fit their chunks.
    """
    if not isinstance(results[0], DataProto):
        return results[0]
    if not all(isinstance(result, DataProto) for result in results):
        raise DataError(f"DP ranks returned different kinds: {[type(result).__name__ for result in results]}")
    copies = len(results[0]) // len(plan[0])
    for dp, (result, rows) in enumerate(zip(results, plan, strict=True)):
        if len(result) != copies * len(rows) or not len(result):
            raise DataError(f"DP rank {dp} returned {len(result)} rows for a chunk of {len(rows)}")
    # Each rank may report facts of its own in meta_info; there is one batch, so one rank's count.
    joined = DataProto.concat([DataProto(result.batch, result.non_tensor_batch) for result in results])
    position = {row: place for place, row in reversed(list(enumerate(row for rows in plan for row in rows)))}
    order = [position[row] * copies + copy for row in sorted(position) for copy in range(copies)]
    joined = joined[np.asarray(order, dtype=np.int64)]
    joined.meta_info = dict(results[0].meta_info)
    return joined


def seqlen_metrics(
    lengths: Sequence[int], costs: Sequence[float], plan: Plan, mini_batch_rows: int | None = None
) -> dict[str, float]:
    """How much the balancing gains.

    Args:
        lengths: tokens per row.
        costs: work per row.
        plan: rows of each DP rank.
        mini_batch_rows: rows between two points at which ranks wait for each other; None: all.

    Returns:
        ``global_seqlen/min``, ``max`` and ``minmax_diff``, in tokens per DP rank, if the rows were cut in the caller's
        order into equal counts, ``balanced_min`` and ``balanced_max`` as ``plan`` splits them, and the ``mean``.
        ``global_seqlen/imbalance`` and ``balanced_imbalance`` are likewise the work of the busiest rank of each
        mini-batch over the mean work: how much longer the update takes than with perfect balance.
    """
    size, dp = mini_batch_rows or len(lengths), len(plan)
    plain = [rows.tolist() for rows in np.array_split(np.arange(len(lengths)), dp)]
    before, after = ([sum(lengths[row] for row in rows) for rows in cut] for cut in (plain, plan))
    in_order = [
        [start + row for start in range(0, len(lengths), size) for row in np.array_split(np.arange(size), dp)[rank]]
        for rank in range(dp)
    ]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(lengths) / dp,
        "global_seqlen/imbalance": _imbalance(costs, in_order, size),
        "global_seqlen/balanced_imbalance": _imbalance(costs, plan, size),
    }


def rank_loads(lengths: Sequence[int], costs: Sequence[float], plan: Plan) -> tuple[list[float], list[float]]:
    """Tokens of each DP rank, and its work over the mean of the ranks."""
    tokens, work = (np.array([sum(values[row] for row in rows) for rows in plan], float) for values in (lengths, costs))
    return tokens.tolist(), (work / work.mean()).tolist()


def _imbalance(costs: Sequence[float], plan: Plan, mini_batch_rows: int) -> float:
    """Work of the busiest rank of each mini-batch, over the mean work of the ranks."""
    work = np.array(
        [[sum(costs[row] for row in rows) for rows in cut] for cut in _by_mini_batch(plan, mini_batch_rows)]
    )
    return float(work.max(axis=0).sum() / work.mean(axis=0).sum())


def _by_mini_batch(plan: Plan, mini_batch_rows: int) -> list[Plan]:
    """For each DP rank, its rows of each mini-batch."""
    cuts = [np.cumsum([0, *sizes]).tolist() for sizes in mini_batch_sizes(plan, mini_batch_rows)]
    return [[rows[a:b] for a, b in pairwise(ends)] for rows, ends in zip(plan, cuts, strict=True)]


def _can_be_cut(lengths: Sequence[int], plan: Plan, budget: MicroBatchBudget, mini_batch_rows: int | None) -> bool:
    """Whether every rank has a row for each of the micro-batches that all must make."""
    for parts in zip(*_by_mini_batch(plan, mini_batch_rows or len(lengths)), strict=True):
        needed = [fewest_micro_batches([lengths[row] for row in rows], max_tokens=budget.max_tokens) for rows in parts]
        if common_count(needed, budget.multiple) > min(map(len, parts)):
            return False
    return True
