"""Assignment of rows to data-parallel ranks and back: pure functions of lengths.

A plan has one entry per DP rank: the indices of the caller's rows that the rank gets, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megarl.base.errors import DataError
from megarl.data import (
    DataProto,
    balance_mini_batches,
    balanced_partition,
    check_longest,
    common_micro_batch_count,
    fewest_micro_batches,
    token_counts,
)
from megarl.data.remote import Chunk, ChunkReference
from megarl.data.remote_columns import write_values
from megarl.data.shared_prompts import SharedPromptRows, partition_by_prompt
from megarl.models.sequence_cost import TOKENS, SequenceCost
from megarl.workers.dispatch import MINI_BATCH_SIZES
from megarl.workers.settings import MicroBatchBudget

Plan = list[list[int]]


def row_lengths(batch: DataProto) -> list[int] | None:
    """Count the tokens of each row; None before there are responses."""
    columns = batch.tensors
    if "attention_mask" not in columns or not {"responses", "rejected", "kl_sequence"} & columns.keys():
        return None
    return token_counts(batch)


def row_costs(batch: DataProto, cost: SequenceCost = TOKENS) -> list[float]:
    """Estimate the work per row from its number of tokens.

    Every row costs 1 if there are no ``responses`` or ``meta_info["balance_batch"]`` is False.
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
    """Assign the rows of a batch to DP ranks with equal work (partition balancing).

    With a token budget, ranks get unequal numbers of rows with equal work. If some rank would then have fewer rows than
    the common number of micro-batches (:func:`megarl.data.common_micro_batch_count`), all ranks get the same number of
    rows. With a fixed number of rows per micro-batch they always do. With shared prompts, rows of one prompt stay on
    one rank if that reduces the work of the busiest rank.

    Args:
        batch: rows with their lengths.
        dp: number of DP ranks.
        mini_batch_rows: see :func:`plan_split`.
        equal: see :func:`plan_split`; a token ``budget`` may still give unequal numbers.
        budget: micro-batch budget of the ranks; None: they make no micro-batches.

    Raises:
        DataError: see :func:`plan_split`; or a row has more tokens than the budget.
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
    """``plan``, or one with rows of a prompt on one rank if the busiest ranks then have less work."""
    rows, size, by_tokens = SharedPromptRows.of(batch), mini_batch_rows or len(lengths), budget.max_tokens is not None
    grouped = partition_by_prompt(rows, budget.cost, len(plan), size, equal=not by_tokens)
    if grouped is None or (by_tokens and not _can_be_cut(lengths, grouped, budget, mini_batch_rows)):
        return plan

    def slowest(plan: Plan) -> float:
        cuts = zip(*_by_mini_batch(plan, size), strict=True)
        return sum(max(rows.cost(part, budget.cost) for part in parts) for parts in cuts)

    return min(plan, grouped, key=slowest)


def plan_groups(batch: DataProto, dp: int, groups: np.ndarray) -> Plan:
    """Assign whole groups of rows to at most ``dp`` ranks with nearly equal numbers of tokens.

    Args:
        batch: rows with their lengths.
        dp: number of DP ranks.
        groups: ``[b]`` group of each row.

    Returns:
        One entry per rank that has rows, in ascending order.
    """
    _, numbers = np.unique(groups.astype(str), return_inverse=True)
    numbers = numbers.reshape(-1)
    parts = balanced_partition(np.bincount(numbers, token_counts(batch)).tolist(), min(dp, int(numbers.max()) + 1))
    owner = np.empty(int(numbers.max()) + 1, np.int64)
    for rank, members in enumerate(parts):
        owner[members] = rank
    return [np.flatnonzero(owner[numbers] == rank).tolist() for rank in range(len(parts))]


def plan_split(costs: Sequence[float], dp: int, mini_batch_rows: int | None = None, *, equal: bool = False) -> Plan:
    """Assign rows to DP ranks with equal cost.

    Args:
        costs: work per row.
        dp: number of DP ranks.
        mini_batch_rows: rows per global mini-batch; consecutive rows of the caller's order, independent of ``dp``.
            Every rank gets a share of each, mini-batch after mini-batch. None: one mini-batch.
        equal: every rank must get the same number of rows of each mini-batch. Otherwise counts may differ. With fewer
            rows than ranks, the remaining ranks get a copy of row 0, so that no rank misses a collective call.

    Raises:
        DataError: no rows, or a number of rows that does not divide as required.
    """
    return [list(rows) for rows in _plan_split(tuple(costs), dp, mini_batch_rows, equal)]


@functools.lru_cache(maxsize=8)  # update and metrics of a step have one plan
def _plan_split(costs: tuple[float, ...], dp: int, mini_batch_rows: int | None, equal: bool) -> Plan:
    if not costs:
        raise DataError("a batch of 0 rows cannot be split over data-parallel ranks", code="batch.no-rows")
    if not equal and mini_batch_rows is None:
        plan = balanced_partition(costs, min(dp, len(costs)), equal_size=False)
        return [sorted(rows) for rows in plan] + [[0]] * (dp - len(plan))
    size = len(costs) if mini_batch_rows is None else mini_batch_rows
    if size < 1 or len(costs) % size:
        raise DataError(f"mini-batches of {size} rows do not divide {len(costs)} rows", code="batch.mini-batch-rows")
    if size % dp:
        raise DataError(f"mini-batches of {size} rows do not divide over {dp} DP ranks", code="batch.mini-batch-ranks")
    mini_batches = balance_mini_batches(costs, len(costs) // size, dp, equal)
    return [[row for parts in mini_batches for row in parts[rank]] for rank in range(dp)]


def mini_batch_sizes(plan: Plan, mini_batch_rows: int) -> list[list[int]]:
    """Count the rows of each mini-batch (``mini_batch_rows`` consecutive rows of the caller's order), by DP rank."""
    count = 1 + max(map(max, plan)) // mini_batch_rows
    return [np.bincount(np.array(rows) // mini_batch_rows, minlength=count).tolist() for rows in plan]


def split(
    batch: DataProto,
    plan: Plan,
    mini_batch_rows: int | None = None,
    write: Callable[[Chunk], ChunkReference] | None = None,
) -> list[DataProto]:
    """Cut a batch into one part per DP rank; every part has the whole ``meta_info``.

    Args:
        batch: all rows.
        plan: rows of each part.
        mini_batch_rows: ``meta_info`` then also has the part's rows per mini-batch, under
            :data:`megarl.workers.dispatch.MINI_BATCH_SIZES`.
        write: writes the token values of a part that are still in this process to a store, before the cut; later
            splits of the same columns send references only. None: the parts have values.

    Raises:
        DataError: the plan is for another number of rows.
    """
    rows = 1 + max(max(indices) for indices in plan)
    if rows != len(batch):
        raise DataError(f"the batches of one call have {rows} and {len(batch)} rows", code="batch.different-rows")
    if write is not None:
        write_values(batch, plan, write)
    chunks = batch.parts(plan)
    if mini_batch_rows is not None:
        for chunk, sizes in zip(chunks, mini_batch_sizes(plan, mini_batch_rows), strict=True):
            chunk.meta_info = {**chunk.meta_info, MINI_BATCH_SIZES: sizes}
    return chunks


def collect(results: Sequence[Any], plan: Plan) -> Any:
    """Join the results of the DP ranks in the caller's row order.

    Args:
        results: result of each DP rank's owner: a ``DataProto`` with ``n`` consecutive rows per row of its chunk, in
            the chunk's order; or a ``dict`` or None.
        plan: the plan of the split.

    Returns:
        For ``DataProto``: one with ``n`` rows per row of the caller, and DP rank 0's ``meta_info``. Otherwise DP rank
            0's result.

    Raises:
        DataError: the ranks returned different types, or numbers of rows that do not match their chunks.
    """
    if not isinstance(results[0], DataProto):
        return results[0]
    if not all(isinstance(result, DataProto) for result in results):
        raise DataError(
            f"DP ranks returned different types: {[type(result).__name__ for result in results]}",
            code="worker.result-types",
        )
    copies = len(results[0]) // len(plan[0])
    for dp, (result, rows) in enumerate(zip(results, plan, strict=True)):
        if len(result) != copies * len(rows) or not len(result):
            raise DataError(f"DP rank {dp} returned {len(result)} rows for its {len(rows)}", code="worker.result-rows")
    _, first = np.unique(np.concatenate([np.asarray(rows, np.int64) for rows in plan]), return_index=True)
    order = (first[:, None] * copies + np.arange(copies)).reshape(-1)
    # Ranks may return different meta_info; the joined batch takes the first rank's.
    parts = [DataProto(result.tensors or None, result.non_tensor_batch) for result in results]
    joined = DataProto.concat(parts, order)
    joined.meta_info = dict(results[0].meta_info)
    return joined


def seqlen_metrics(
    lengths: Sequence[int], costs: Sequence[float], plan: Plan, mini_batch_rows: int | None = None
) -> dict[str, float]:
    """Compute the metrics of the gain from partition balancing.

    Args:
        lengths: tokens per row.
        costs: work per row.
        plan: rows of each DP rank.
        mini_batch_rows: rows between two synchronization points of the ranks; None: all.

    Returns:
        ``global_seqlen/min``, ``max`` and ``minmax_diff``: tokens per DP rank if the rows were split in the caller's
        order into equal counts. ``balanced_min`` and ``balanced_max``: the same under ``plan``. ``mean``. ``imbalance``
        and ``balanced_imbalance``: work of the busiest rank of each mini-batch over the mean work, the slowdown of the
        update against perfect balance.
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
    """Sum the tokens of each DP rank, and its work relative to the mean of the ranks."""
    tokens, work = (np.array([sum(values[row] for row in rows) for rows in plan], float) for values in (lengths, costs))
    return tokens.tolist(), (work / work.mean()).tolist()


def _imbalance(costs: Sequence[float], plan: Plan, mini_batch_rows: int) -> float:
    """Work of the busiest rank of each mini-batch, over the mean work of the ranks."""
    work = np.array(
        [[sum(costs[row] for row in rows) for rows in cut] for cut in _by_mini_batch(plan, mini_batch_rows)]
    )
    return float(work.max(axis=0).sum() / work.mean(axis=0).sum())


def _by_mini_batch(plan: Plan, mini_batch_rows: int) -> list[Plan]:
    """Rows of each mini-batch, for each DP rank."""
    cuts = [np.cumsum([0, *sizes]).tolist() for sizes in mini_batch_sizes(plan, mini_batch_rows)]
    return [[rows[a:b] for a, b in pairwise(ends)] for rows, ends in zip(plan, cuts, strict=True)]


def _can_be_cut(lengths: Sequence[int], plan: Plan, budget: MicroBatchBudget, mini_batch_rows: int | None) -> bool:
    """Whether every rank has a row for each of the micro-batches that all ranks run."""
    for parts in zip(*_by_mini_batch(plan, mini_batch_rows or len(lengths)), strict=True):
        needed = [fewest_micro_batches([lengths[row] for row in rows], max_tokens=budget.max_tokens) for rows in parts]
        if common_micro_batch_count(needed, budget.multiple) > min(map(len, parts)):
            return False
    return True
