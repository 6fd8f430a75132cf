"""Rows to data-parallel ranks and back: pure functions of lengths, tested without a process.

A plan is a list with, per DP rank, the indices of the caller's rows that it gets, in the order in which it gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.data import DataProto, balance_mini_batches, balanced_partition
from megarl.errors import DataError

Plan = list[list[int]]


def row_costs(batch: DataProto) -> list[int]:
    """Work per row: its real tokens, by ``attention_mask`` ``[rows, P + R]``.

    Rows without ``responses`` cost 1 each: prompts are still to be answered, and how long that takes has little to do
    with their own length. So does every row where ``meta_info["balance_batch"]`` is False.
    """
    columns = batch.tensors
    known = "responses" in columns and "attention_mask" in columns
    if not known or not batch.meta_info.get("balance_batch", True):
        return [1] * len(batch)
    return columns["attention_mask"].sum(-1).tolist()


def plan_split(costs: Sequence[int], dp: int, mini_batch_rows: int | None = None, *, equal: bool = False) -> Plan:
    """Assign rows to DP ranks so that every rank has about the same cost.

    Args:
        costs: work per row.
        dp: number of DP ranks.
        mini_batch_rows: rows per global mini-batch, which are consecutive rows of the caller's order whatever ``dp``
            is. Every rank gets ``mini_batch_rows / dp`` rows of each, mini-batch after mini-batch. None: one for all.
        equal: every rank must get equally many rows of each mini-batch. Otherwise counts may differ; with fewer rows
            than ranks the idle ones get a copy of row 0, so that no rank misses a collective call.

    Raises:
        DataError: no rows, or rows that do not divide as asked.
    """
    if not costs:
        raise DataError("a batch of 0 rows cannot be split over data-parallel ranks; it needs at least 1")
    if not equal:
        plan = balanced_partition(costs, min(dp, len(costs)), equal_size=False)
        return [sorted(rows) for rows in plan] + [[0]] * (dp - len(plan))
    size = len(costs) if mini_batch_rows is None else mini_batch_rows
    if size < 1 or len(costs) % size:
        raise DataError(f"mini-batches of {size} rows do not divide a batch of {len(costs)} rows")
    if size % dp:
        raise DataError(f"a mini-batch of {size} rows does not divide over {dp} data-parallel ranks")
    return [list(rows) for rows in balance_mini_batches(costs, len(costs) // size, dp)]


def split(batch: DataProto, plan: Plan) -> list[DataProto]:
    """The chunk of each DP rank; every chunk has the whole ``meta_info``.

    Raises:
        DataError: the plan was made for another number of rows.
    """
    rows = 1 + max(max(indices) for indices in plan)
    if rows != len(batch):
        raise DataError(f"all batches of one call must have the same rows: {len(batch)}, expected {rows}")
    return [batch[np.asarray(indices, dtype=np.int64)] for indices in plan]


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


def seqlen_metrics(costs: Sequence[int], plan: Plan) -> dict[str, float]:
    """How much the balancing gains, in tokens per DP rank.

    Returns:
        ``global_seqlen/min``, ``max`` and ``minmax_diff`` if the rows were cut in the caller's order into equal
        counts, ``balanced_min`` and ``balanced_max`` as ``plan`` splits them, and the ``mean`` of both.
    """
    plain = [sum(costs[row] for row in rows) for rows in np.array_split(np.arange(len(costs)), len(plan))]
    balanced = [sum(costs[row] for row in rows) for rows in plan]
    return {
        "global_seqlen/min": float(min(plain)),
        "global_seqlen/max": float(max(plain)),
        "global_seqlen/minmax_diff": float(max(plain) - min(plain)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(costs) / len(plan),
    }
