"""Partition of a batch: its rows to data-parallel ranks and back, as pure functions of lengths.

A batch carries its partitions: one per number of ranks, mini-batch size and token budget. Verbs, row functions and
metrics of a step read the same one; a batch with other rows has none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
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
from megarl.data.ragged import Chunk, ChunkReference
from megarl.data.remote_columns import write_values
from megarl.data.shared_prompts import SharedPromptRows, partition_by_prompt
from megarl.models.sequence_cost import TOKENS, SequenceCost
from megarl.workers.dispatch import MINI_BATCH_SIZES, UPDATE_ROWS
from megarl.workers.settings import MicroBatchBudget

Rows = list[list[int]]
"""Row indices of each data-parallel rank, in order."""
Shares = Sequence[tuple[int, ...]]
"""Data-parallel ranks of each receiver: one rank, or those of a node."""


@dataclass(frozen=True)
class Partition:
    """Rows of a batch that each data-parallel rank gets.

    Attributes:
        rows: positions in the batch, by rank. With mini-batches, a rank has its rows of the first, then of the second.
        mini_batch_rows: rows per global mini-batch, consecutive in the batch; None = no mini-batches.
        sizes: rows of each mini-batch, by rank; None = by ``mini_batch_rows``.
    """

    rows: Rows
    mini_batch_rows: int | None = None
    sizes: list[list[int]] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return 1 + max(max(rows) for rows in self.rows)

    @cached_property
    def mini_batch_sizes(self) -> list[list[int]]:
        """Rows of each mini-batch, by rank."""
        if self.sizes is not None:
            return self.sizes
        size = self.mini_batch_rows or self.num_rows
        count = 1 + (self.num_rows - 1) // size
        return [np.bincount(np.array(rows) // size, minlength=count).tolist() for rows in self.rows]

    @property
    def mini_batches(self) -> list[Rows]:
        """Row indices of each mini-batch, by rank."""
        ends = [np.cumsum([0, *sizes]).tolist() for sizes in self.mini_batch_sizes]
        by_rank = [[rows[a:b] for a, b in pairwise(cuts)] for rows, cuts in zip(self.rows, ends, strict=True)]
        return [list(parts) for parts in zip(*by_rank, strict=True)]

    def split(
        self, batch: DataProto, write: Callable[[Chunk], ChunkReference] | None = None, shares: Shares | None = None
    ) -> list[DataProto]:
        """Cut a batch into one part per receiver; every part has the whole ``meta_info``.

        A rank's part with mini-batches also has its rows per mini-batch in ``meta_info``, under
        :data:`megarl.workers.dispatch.MINI_BATCH_SIZES`.

        Args:
            write: writes the token values of a part that are still in this process to a store, before the cut, so that
                the parts have references; see :func:`megarl.data.remote_columns.write_values`. None: the parts have
                values.
            shares: ranks of each receiver; the part of several ranks has their rows one rank after the other. None:
                each rank is a receiver.

        Raises:
            DataError: the partition is for another number of rows.
        """
        if self.num_rows != len(batch):
            text = f"the batches of one call have {self.num_rows} and {len(batch)} rows"
            raise DataError(text, code="batch.different-rows")
        shares = self._shares(shares)
        if write is not None:
            batch = write_values(batch, self.chunks(shares), write)
        parts = batch.parts([self._rows_of(share) for share in shares])
        if self._has_mini_batches:
            for part, share in zip(parts, shares, strict=True):
                if len(share) == 1:
                    part.meta_info |= {MINI_BATCH_SIZES: self.mini_batch_sizes[share[0]]}
        return parts

    def of_ranks(self, share: Sequence[int]) -> Partition:
        """Return the partition of a part for several ranks, see :meth:`split`."""
        ends = accumulate((len(self.rows[rank]) for rank in share), initial=0)
        rows = [list(range(begin, end)) for begin, end in pairwise(ends)]
        sizes = [self.mini_batch_sizes[rank] for rank in share] if self._has_mini_batches else None
        return Partition(rows, sizes=sizes)

    def chunks(self, shares: Shares) -> Rows:
        """Return the rows that are stored together: those of each receiver, each row once."""
        stored: set[int] = set()
        chunks = []
        for share in sorted(shares, key=len, reverse=True):
            chunks.append(self._rows_of([rank for rank in share if rank not in stored]))
            stored.update(share)
        return [rows for rows in chunks if rows]

    def collect(self, results: Sequence[Any], shares: Shares | None = None) -> Any:
        """Join the results in the batch's row order.

        Args:
            results: of each rank or receiver: a ``DataProto`` with ``n`` consecutive rows per row of its part, in the
                part's order; or a ``dict`` or None.
            shares: ranks of each receiver, as in :meth:`split`.

        Returns:
            For ``DataProto``: one with ``n`` rows per row of the batch, and the first result's ``meta_info``. Otherwise
            the first result.

        Raises:
            DataError: the ranks returned different types, or numbers of rows that do not match their parts.
        """
        if not isinstance(results[0], DataProto):
            return results[0]
        if not all(isinstance(result, DataProto) for result in results):
            raise DataError(
                f"DP ranks returned different types: {[type(result).__name__ for result in results]}",
                code="worker.result-types",
            )
        shares = self._shares(shares)
        parts_rows = [self._rows_of(share) for share in shares]
        copies = len(results[0]) // len(parts_rows[0])
        for share, result, rows in zip(shares, results, parts_rows, strict=True):
            if len(result) != copies * len(rows) or not len(result):
                text = f"DP rank {', '.join(map(str, share))} returned {len(result)} rows for its {len(rows)}"
                raise DataError(text, code="worker.result-rows")
        _, first = np.unique(np.concatenate([np.asarray(rows, np.int64) for rows in parts_rows]), return_index=True)
        order = (first[:, None] * copies + np.arange(copies)).reshape(-1)
        # Ranks may return different meta_info; the joined batch takes the first rank's.
        parts = [DataProto(result.tensors, result.non_tensor_batch) for result in results]
        joined = DataProto.concat(parts, order)
        joined.meta_info = dict(results[0].meta_info)
        return joined

    def loads(self, lengths: Sequence[int], costs: Sequence[float]) -> tuple[list[float], list[float]]:
        """Sum the tokens of each rank, and its work relative to the mean of the ranks.

        Args:
            lengths: tokens per row.
            costs: work per row.
        """
        tokens, work = (
            np.array([sum(values[row] for row in rows) for rows in self.rows], float) for values in (lengths, costs)
        )
        return tokens.tolist(), (work / work.mean()).tolist()

    def imbalance(self, costs: Sequence[float]) -> float:
        """Return the busiest rank's work in each mini-batch, over the ranks' mean work."""
        work = np.array([[sum(costs[row] for row in rows) for rows in ranks] for ranks in self.mini_batches])
        return float(work.max(axis=1).sum() / work.mean(axis=1).sum())

    @property
    def _has_mini_batches(self) -> bool:
        return self.mini_batch_rows is not None or self.sizes is not None

    def _shares(self, shares: Shares | None) -> Shares:
        return [(rank,) for rank in range(len(self.rows))] if shares is None else shares

    def _rows_of(self, share: Sequence[int]) -> list[int]:
        return self.rows[share[0]] if len(share) == 1 else list(chain.from_iterable(self.rows[rank] for rank in share))


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


def partition_rows(
    batch: DataProto,
    dp: int,
    mini_batch_rows: int | None = None,
    *,
    equal: bool = False,
    budget: MicroBatchBudget | None = None,
) -> Partition:
    """Assign a batch's rows to DP ranks with equal work (partition balancing); the batch keeps the result.

    With a token budget, ranks get unequal numbers of rows with equal work. If some rank would then have fewer rows than
    the common number of micro-batches (:func:`megarl.data.common_micro_batch_count`), all ranks get the same number of
    rows. With a fixed number of rows per micro-batch they always do. With shared prompts, rows of one prompt stay on
    one rank if that reduces the work of the busiest rank. The shares of several mini-batches go to the ranks so that
    their sums are even too.

    Without mini-batches, ranks get the rows of the update that follows, if the batch states its mini-batches
    (:data:`megarl.workers.dispatch.UPDATE_ROWS`): a node would otherwise read nearly every chunk of the batch for its
    few rows of each. This needs mini-batches that divide over the ranks, and rows for every rank's micro-batches.

    Args:
        mini_batch_rows, equal: see :func:`partition_costs`; a token ``budget`` may still give unequal numbers.
        budget: micro-batch budget of the ranks; None: they make no micro-batches.

    Raises:
        DataError: see :func:`partition_costs`; or a row has more tokens than the budget.
    """
    info = batch.meta_info
    request = (dp, mini_batch_rows, equal, budget, info.get("balance_batch", True), info.get(UPDATE_ROWS))
    if request not in batch.partitions:
        partition = None if equal or mini_batch_rows is not None else _rows_of_update(batch, dp, budget)
        batch.partitions[request] = partition or _partition_rows(batch, dp, mini_batch_rows, equal, budget)
    known: Partition = batch.partitions[request]
    return known


def _rows_of_update(batch: DataProto, dp: int, budget: MicroBatchBudget | None) -> Partition | None:
    """Return the rows that each rank gets in the update; None if a verb without mini-batches cannot have them."""
    size = batch.meta_info.get(UPDATE_ROWS)
    if size is None or len(batch) % size or size % dp:
        return None
    partition = Partition(partition_rows(batch, dp, size, equal=True, budget=budget).rows)
    if budget is None or budget.max_tokens is None or (lengths := row_lengths(batch)) is None:
        return partition
    return partition if _can_be_cut(lengths, partition, budget) else None


def _partition_rows(
    batch: DataProto, dp: int, mini_batch_rows: int | None, equal: bool, budget: MicroBatchBudget | None
) -> Partition:
    lengths = row_lengths(batch)
    if budget is None or lengths is None:
        costs = row_costs(batch)
        return _with_even_sums(partition_costs(costs, dp, mini_batch_rows, equal=equal), costs)
    if budget.max_tokens is not None:
        uids = batch.non_tensor_batch.get("uid")
        check_longest(
            lengths, budget.max_tokens, lambda row: f"row {row}" + ("" if uids is None else f" (uid={uids[row]})")
        )
    costs = row_costs(batch, budget.cost)
    partition = None if budget.max_tokens is None else partition_costs(costs, dp, mini_batch_rows)
    if partition is None or not _can_be_cut(lengths, partition, budget):
        partition = partition_costs(costs, dp, mini_batch_rows, equal=True)
    if budget.share_prompts and batch.meta_info.get("balance_batch", True):
        partition = _cheaper_with_families(batch, lengths, partition, budget)
    return _with_even_sums(partition, costs)


def _with_even_sums(partition: Partition, costs: Sequence[float]) -> Partition:
    """Permute the shares of each mini-batch: the most expensive one to the rank with the cheapest shares so far."""
    if partition.mini_batch_rows in (None, len(costs)):
        return partition
    values, sums = np.asarray(costs), np.zeros(len(partition.rows))
    rows: Rows = [[] for _ in sums]
    for shares in partition.mini_batches:
        work = np.array([values[share].sum() for share in shares])
        for rank, share in zip(np.argsort(sums, kind="stable"), np.argsort(-work, kind="stable"), strict=True):
            rows[rank] += shares[share]
        sums = np.array([values[of_rank].sum() for of_rank in rows])
    return Partition(rows, partition.mini_batch_rows)


def _cheaper_with_families(
    batch: DataProto, lengths: Sequence[int], partition: Partition, budget: MicroBatchBudget
) -> Partition:
    """``partition``, or one with rows of a prompt on one rank if the busiest ranks then have less work."""
    rows, by_tokens = SharedPromptRows.of(batch), budget.max_tokens is not None
    size = partition.mini_batch_rows or len(lengths)
    families = partition_by_prompt(rows, budget.cost, len(partition.rows), size, equal=not by_tokens)
    grouped = None if families is None else Partition(families, partition.mini_batch_rows)
    if grouped is None or (by_tokens and not _can_be_cut(lengths, grouped, budget)):
        return partition

    def slowest(partition: Partition) -> float:
        return sum(max(rows.cost(part, budget.cost) for part in ranks) for ranks in partition.mini_batches)

    return min(partition, grouped, key=slowest)


def partition_groups(batch: DataProto, dp: int, groups: np.ndarray) -> Partition:
    """Assign whole groups of rows to at most ``dp`` ranks with nearly equal numbers of tokens.

    Args:
        groups: ``[b]`` group of each row.

    Returns:
        Of the ranks that have rows, in ascending order.
    """
    _, numbers = np.unique(groups.astype(str), return_inverse=True)
    numbers = numbers.reshape(-1)
    parts = balanced_partition(np.bincount(numbers, token_counts(batch)).tolist(), min(dp, int(numbers.max()) + 1))
    owner = np.empty(int(numbers.max()) + 1, np.int64)
    for rank, members in enumerate(parts):
        owner[members] = rank
    return Partition([np.flatnonzero(owner[numbers] == rank).tolist() for rank in range(len(parts))])


def partition_costs(
    costs: Sequence[float], dp: int, mini_batch_rows: int | None = None, *, equal: bool = False
) -> Partition:
    """Assign rows to DP ranks with equal cost.

    Args:
        costs: work per row.
        mini_batch_rows: rows per global mini-batch; consecutive rows of the batch, independent of ``dp``. Every rank
            gets a share of each, mini-batch after mini-batch. None: no mini-batches.
        equal: every rank must get equally many rows of each mini-batch. Otherwise counts may differ. With fewer
            rows than ranks, the remaining ranks get a copy of row 0, so that no rank misses a collective call.

    Raises:
        DataError: no rows, or a number of rows that does not divide as required.
    """
    if not costs:
        raise DataError("a batch of 0 rows cannot be split over data-parallel ranks", code="batch.no-rows")
    if not equal and mini_batch_rows is None:
        parts = balanced_partition(costs, min(dp, len(costs)), equal_size=False)
        return Partition([sorted(rows) for rows in parts] + [[0]] * (dp - len(parts)))
    size = len(costs) if mini_batch_rows is None else mini_batch_rows
    if size < 1 or len(costs) % size:
        raise DataError(f"mini-batches of {size} rows do not divide {len(costs)} rows", code="batch.mini-batch-rows")
    if size % dp:
        raise DataError(f"mini-batches of {size} rows do not divide over {dp} DP ranks", code="batch.mini-batch-ranks")
    mini_batches = balance_mini_batches(costs, len(costs) // size, dp, equal)
    return Partition([[row for parts in mini_batches for row in parts[rank]] for rank in range(dp)], mini_batch_rows)


def seqlen_metrics(lengths: Sequence[int], costs: Sequence[float], partition: Partition) -> dict[str, float]:
    """Compute the metrics of the gain from partition balancing.

    Args:
        lengths: tokens per row.
        costs: work per row.
        partition: of the rows; ranks wait for each other after each mini-batch.

    Returns:
        ``global_seqlen/min``, ``max`` and ``minmax_diff``: tokens per DP rank if the rows were split in the caller's
        order into equal counts. ``balanced_min`` and ``balanced_max``: the same under ``partition``. ``mean``.
        ``imbalance`` and ``balanced_imbalance``: the busiest rank's work in each mini-batch over the mean work, the
        slowdown of the update against perfect balance.
    """
    size, dp = partition.mini_batch_rows or len(lengths), len(partition.rows)
    plain = [rows.tolist() for rows in np.array_split(np.arange(len(lengths)), dp)]
    before, after = ([sum(lengths[row] for row in rows) for rows in cut] for cut in (plain, partition.rows))
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
        "global_seqlen/imbalance": Partition(in_order, size).imbalance(costs),
        "global_seqlen/balanced_imbalance": partition.imbalance(costs),
    }


def _can_be_cut(lengths: Sequence[int], partition: Partition, budget: MicroBatchBudget) -> bool:
    """Whether every rank has a row for each of the micro-batches that all ranks run."""
    for parts in partition.mini_batches:
        needed = [fewest_micro_batches([lengths[row] for row in rows], max_tokens=budget.max_tokens) for rows in parts]
        if common_micro_batch_count(needed, budget.multiple) > min(map(len, parts)):
            return False
    return True
