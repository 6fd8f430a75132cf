"""Micro-batch budgets that shrink when the device runs out of memory; the results of a pass do not change."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megarl.base.errors import DataError
from megarl.base.reductions import Smallest, Total
from megarl.megatron.engine.out_of_memory import DeviceMemoryError
from megarl.workers.rows import PackedRows
from megarl.workers.settings import MicroBatchBudget

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

UPDATE, FORWARD = "update", "forward"
"""Kinds of passes, with and without gradients; each has separate micro-batch budgets."""
EIGHTHS = (4, 5, 6, 7)
"""Shares of the largest micro-batch to which a budget shrinks: a half, or the next share that all ranks can use."""


class MemoryBudgets:
    """Budgets of a role's passes, by kind of pass; the same on every rank.

    Args:
        prefix: of the role's metrics and messages.
        counts_over_dp: gathers one number of every data-parallel rank; communicates.
        max_over_ranks: maximum of a tensor over all ranks of the role; communicates.
    """

    def __init__(
        self, prefix: str, counts_over_dp: Callable[[int], list[int]], max_over_ranks: Callable[[Tensor], Tensor]
    ) -> None:
        self._prefix = prefix
        self._counts_over_dp = counts_over_dp
        self._max_over_ranks = max_over_ranks
        self._shrunk: dict[tuple[str, MicroBatchBudget], MicroBatchBudget] = {}
        self._events: Counter[str] = Counter()

    def run_pass(
        self,
        kind: str,
        budget: MicroBatchBudget,
        rows: PackedRows,
        run: Callable[[Sequence[Sequence[int]]], _Result],
        chosen: Sequence[int] | None = None,
    ) -> _Result:
        """Cut rows into micro-batches and run a pass; after an out-of-memory error repeat it with smaller ones.

        All ranks shrink the budget together, and keep it for later passes of this kind. Communicates.

        Args:
            run: computes the pass from the rows of each micro-batch; may run more than once.

        Raises:
            DeviceMemoryError: the pass cannot be repeated, or a single row is too large.
        """
        chosen = range(len(rows)) if chosen is None else chosen
        current = self._usable(kind, budget, rows, chosen)
        while True:
            groups = rows.micro_batches(current, chosen, self._counts_over_dp)
            try:
                return run(groups)
            except DeviceMemoryError as error:
                text, can_repeat = f"{self._prefix}: {error.text}", error.repeatable
            # Only here, outside of the handler, no traceback keeps the activations alive.
            smaller = self._shrink(kind, budget, rows, groups) if can_repeat else None
            if smaller is None:
                raise DeviceMemoryError(f"{text}\n{self._advice(rows, budget, groups)}", repeatable=False)
            logger.warning("%s. All ranks repeat the pass with %s per micro-batch", text, smaller.describe())
            current = smaller

    @staticmethod
    def _advice(rows: PackedRows, budget: MicroBatchBudget, groups: Sequence[Sequence[int]]) -> str:
        """Name the budget to set after an out-of-memory error."""
        largest = max(groups, key=lambda group: rows.load(budget, group))
        size = budget.with_limit(rows.load(budget, largest)).describe()
        if len(largest) == 1:
            return (
                f"Its largest micro-batch is a single row of {size}: set recompute_granularity=full, use more tensor "
                "or context parallelism, or give the engine less memory (docs/how_to/gpu.md)."
            )
        key = "*micro_batch_size_per_gpu" if budget.max_tokens is None else "*max_token_len_per_gpu"
        return (
            f"Its largest micro-batch has {size}: set {key} of this role to {budget.limit // 2} or less and resume; "
            "the results stay the same."
        )

    def _usable(
        self, kind: str, configured: MicroBatchBudget, rows: PackedRows, chosen: Sequence[int]
    ) -> MicroBatchBudget:
        """Return the budget for some rows; communicates only after an earlier out-of-memory error.

        It is the shrunk budget, or a larger one up to the configured budget if a row is longer than the shrunk one, or
        if a rank has fewer rows than it needs micro-batches.
        """
        shrunk = self._shrunk.get((kind, configured))
        if shrunk is None:
            return configured
        limits = [shrunk.limit]
        while limits[-1] < configured.limit:
            limits.append(min(configured.limit, limits[-1] * 5 // 4 + 1))
        return self._first_possible([shrunk.with_limit(limit) for limit in limits], rows, chosen) or configured

    def _shrink(
        self,
        kind: str,
        configured: MicroBatchBudget,
        rows: PackedRows,
        groups: Sequence[Sequence[int]],
    ) -> MicroBatchBudget | None:
        """Shrink a budget to about half of the largest micro-batch, and not below the longest row; communicates.

        Args:
            groups: its micro-batches, one of which was too large on some rank.

        Returns:
            The smaller budget, which is remembered; None if the micro-batches cannot be smaller.
        """
        chosen = [row for group in groups for row in group]
        sizes = [max(rows.load(configured, group) for group in groups)]
        sizes.append(max(rows.load(configured, [row]) for row in chosen))
        largest, longest = self._max_over_ranks(torch.tensor(sizes)).tolist()
        limits = sorted({max(longest, largest * eighths // 8) for eighths in EIGHTHS})
        smaller = self._first_possible(
            [configured.with_limit(limit) for limit in limits if limit < largest], rows, chosen
        )
        if smaller is not None:
            self._events[kind] += 1
            earlier = self._shrunk.get((kind, configured), smaller)
            self._shrunk[kind, configured] = min(earlier, smaller, key=lambda budget: budget.limit)
        return smaller

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the number of out-of-memory errors, with the smallest budget of each kind in use.

        The metrics have the role's prefix. Empty if there never was such an error.
        """
        if not self._shrunk:
            return {}
        limits: dict[str, float] = {}
        for (kind, _), budget in self._shrunk.items():
            name = f"{kind}_micro_batch_limit"
            limits[name] = Smallest(min(budget.limit, limits.get(name, budget.limit)))
        count, self._events = self._events.total(), Counter()
        metrics = {"out_of_memory": Total(count), **limits}
        return {f"{self._prefix}/{name}": value for name, value in metrics.items()}

    def _first_possible(
        self, budgets: Sequence[MicroBatchBudget], rows: PackedRows, chosen: Sequence[int]
    ) -> MicroBatchBudget | None:
        """The first budget with which all ranks can form the same number of micro-batches."""
        numbers = []
        for budget in budgets:
            try:
                fewest = rows.fewest(budget, chosen)
            except DataError:  # a row is longer than the budget
                fewest = torch.iinfo(torch.int32).max
            numbers.append(-(-fewest // budget.multiple) * budget.multiple)
        *needed, fewest_rows = self._max_over_ranks(torch.tensor([*numbers, -len(chosen)], dtype=torch.int64)).tolist()
        return next((budget for budget, count in zip(budgets, needed, strict=True) if count <= -fewest_rows), None)
