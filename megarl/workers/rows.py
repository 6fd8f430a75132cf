"""Rows packed into micro-batches, by budgets that shrink when the device runs out of memory; results unpacked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megarl.base.errors import DataError
from megarl.base.reductions import Smallest, Total
from megarl.data import (
    DataProto,
    check_longest,
    common_micro_batch_count,
    fewest_micro_batches,
    plan_micro_batches,
    sequence_lengths,
)
from megarl.data.images import IMAGES
from megarl.data.shared_prompts import SharedPromptRows, micro_batch_units, split_units
from megarl.megatron.engine.faults import DeviceMemoryError
from megarl.megatron.layers.logprobs import SUPPORT
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.workers.settings import MicroBatchBudget

SEQUENCES = ("prompts", "responses", "attention_mask", IMAGES)
"""Columns required to pack rows."""
ROUTES = "routed_experts"
"""Column with each token's experts, for routing replay."""
SAMPLE_IDS = ("uid", "index")
"""Non-tensor columns that identify a sample to the user."""

UPDATE, FORWARD = "update", "forward"
"""Kinds of passes, with and without gradients; each has separate micro-batch budgets."""
EIGHTHS = (4, 5, 6, 7)
"""Shares of the largest micro-batch to which a budget shrinks: a half, or the next share that all ranks can use."""

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
GatherCounts = Callable[[int], list[int]]


class PackedRows:
    """The rows of a batch, ready to be packed into micro-batches.

    Args:
        batch: needs ``prompts``, ``responses`` and ``attention_mask``; response-aligned columns are read on demand.
    """

    def __init__(self, batch: DataProto, *, share_prompts: bool = False) -> None:
        self.batch = batch
        self.prompt_lengths, self.response_lengths = (lengths.tolist() for lengths in sequence_lengths(batch))
        self._unpadded: dict[str, list[Tensor]] = {}
        routes = self.unpadded(ROUTES) if share_prompts and ROUTES in batch.tensors else None
        self._shared = SharedPromptRows.of(batch, routes) if share_prompts else None

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def shares_prompts(self) -> bool:
        """Whether a micro-batch computes equal beginnings of its rows once."""
        return self._shared is not None

    def micro_batches(
        self, budget: MicroBatchBudget, rows: Sequence[int] | None = None, gather_counts: GatherCounts | None = None
    ) -> list[list[int]]:
        """Cut ``rows`` (default: all) into micro-batches by ``budget``; returns the row indices of each.

        Args:
            gather_counts: gathers the number of micro-batches that every data-parallel rank needs, from this rank's.
                None: there are no other ranks.

        Raises:
            DataError: a row is above the budget, or there are fewer rows than the common number of micro-batches.
        """
        chosen = list(range(len(self)) if rows is None else rows)
        lengths = [self.prompt_lengths[row] + self.response_lengths[row] for row in chosen]
        if budget.max_tokens is not None:
            check_longest(lengths, budget.max_tokens, lambda index: self.describe(chosen[index]))
        if budget.max_tokens is not None and self._shared is not None:
            return self._shared_micro_batches(self._shared, budget, budget.max_tokens, chosen, gather_counts)
        limits = {"max_tokens": budget.max_tokens, "size": budget.size}
        needed = self.fewest(budget, chosen)
        count = common_micro_batch_count(gather_counts(needed) if gather_counts else [needed], budget.multiple)
        plan = plan_micro_batches(lengths, **limits, count=count, costs=budget.cost.of(lengths))
        return [[chosen[index] for index in group] for group in plan]

    def fewest(self, budget: MicroBatchBudget, rows: Sequence[int]) -> int:
        """Find the smallest number of micro-batches that ``rows`` need; each row must fit into one."""
        lengths = [self.prompt_lengths[row] + self.response_lengths[row] for row in rows]
        if budget.max_tokens is not None and self._shared is not None:
            lengths = [self._shared.tokens(unit) for unit in micro_batch_units(self._shared, rows, budget.max_tokens)]
        return fewest_micro_batches(lengths, max_tokens=budget.max_tokens, size=budget.size)

    def load(self, budget: MicroBatchBudget, rows: Sequence[int]) -> int:
        """Return the size of a micro-batch of ``rows`` in the budget's unit: tokens or rows."""
        if budget.max_tokens is None:
            return len(rows)
        if self._shared is not None:
            return self._shared.tokens(rows)
        return sum(self.prompt_lengths[row] + self.response_lengths[row] for row in rows)

    @staticmethod
    def _shared_micro_batches(
        shared: SharedPromptRows,
        budget: MicroBatchBudget,
        max_tokens: int,
        chosen: Sequence[int],
        gather_counts: GatherCounts | None,
    ) -> list[list[int]]:
        """Like :meth:`micro_batches`, with rows of one prompt together as far as enough micro-batches remain."""
        units = micro_batch_units(shared, chosen, max_tokens)
        needed = fewest_micro_batches([shared.tokens(unit) for unit in units], max_tokens=max_tokens)
        count = common_micro_batch_count(gather_counts(needed) if gather_counts else [needed], budget.multiple)
        units = split_units(units, count)
        plan = plan_micro_batches(
            [shared.tokens(unit) for unit in units],
            max_tokens=max_tokens,
            count=count,
            costs=[shared.cost(unit, budget.cost) for unit in units],
        )
        return [sorted(row for index in group for row in units[index]) for group in plan]

    def pack(
        self,
        rows: Sequence[int],
        columns: Mapping[str, Tensor] | None = None,
        *,
        at_tokens: bool = False,
        replay: bool = True,
    ) -> PackedMicroBatch:
        """Pack rows into one micro-batch, without padding.

        Args:
            columns: further inputs of the loss, packed over the rows' response tokens, besides the column
                :data:`~megarl.megatron.layers.logprobs.SUPPORT`, if the batch has it.
            at_tokens: read outputs at the response tokens instead of one position before them.
            replay: use the experts of the column :data:`ROUTES`, if the batch has it.
        """
        if SUPPORT in self.batch.tensors:
            columns = {**(columns or {}), SUPPORT: self.column(SUPPORT, rows)}
        return PackedMicroBatch.from_rows(
            self.samples(rows),
            columns,
            share_prompts=self.shares_prompts,
            at_tokens=at_tokens,
            routes=[self.unpadded(ROUTES)[row] for row in rows] if replay and ROUTES in self.batch.tensors else None,
        )

    def unpack_routes(self, groups: Sequence[Sequence[int]], routes: Sequence[Sequence[Tensor]]) -> Tensor:
        """Order the experts of each token by rows, for the column :data:`ROUTES`.

        Args:
            routes: per micro-batch and row ``[tokens, expert layers, per token]``.

        Returns:
            ``[sum of sequence lengths, expert layers, per token]`` int16.
        """
        parts: dict[int, Tensor] = {}
        for rows, of_rows in zip(groups, routes, strict=True):
            parts |= zip(rows, of_rows, strict=True)
        return torch.cat([parts[row] for row in range(len(self))]).to(torch.int16)

    def samples(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the prompt and response token ids of each row, without padding."""
        prompts, responses = self.unpadded("prompts"), self.unpadded("responses")
        return [(prompts[row], responses[row]) for row in rows]

    def pack_whole(self, rows: Sequence[int], pad: int | None) -> PackedMicroBatch:
        """Pack one micro-batch of the given rows, each with one output, at its last token that is not ``pad``."""
        return pack_whole(self.samples(rows), pad, share_prompts=self.shares_prompts)

    def column(self, name: str, rows: Sequence[int]) -> Tensor:
        """Pack a response-aligned column of the rows: ``[sum of response lengths, ...]``."""
        values = self.unpadded(name)
        return torch.cat([values[row] for row in rows])

    def unpadded(self, name: str) -> list[Tensor]:
        """Return a column's entries per row, without padding."""
        if name not in self._unpadded:
            self._unpadded[name] = self.batch.unpadded(name)
        return self._unpadded[name]

    def describe(self, row: int) -> str:
        """Name of a row in messages: its :data:`SAMPLE_IDS`, or its index if the batch has none."""
        columns = self.batch.non_tensor_batch
        return " ".join(f"{name}={columns[name][row]}" for name in SAMPLE_IDS if name in columns) or f"row={row}"

    def repack(self, groups: Sequence[Sequence[int]], packed: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """Reorder values over response tokens, one tensor ``[n, ...]`` per micro-batch, into the order of ``rows``."""
        parts: dict[int, Tensor] = {}
        for group, values in zip(groups, packed, strict=True):
            parts |= zip(group, values.split([self.response_lengths[row] for row in group]), strict=True)
        return torch.cat([parts[row] for row in rows])

    def per_row(self, groups: Sequence[Sequence[int]], packed: Sequence[Tensor]) -> Tensor:
        """Return one number per row, ``[batch]`` float32, from one tensor ``[rows]`` per micro-batch."""
        numbers = torch.zeros(len(self))
        for rows, values in zip(groups, packed, strict=True):
            numbers[torch.tensor(rows)] = values.float().cpu()
        return numbers

    def unpack(self, groups: Sequence[Sequence[int]], packed: Sequence[Tensor]) -> Tensor:
        """Order values over response tokens by rows: ``[n, ...]`` per micro-batch to ``[sum of lengths, ...]``, on CPU.

        Integers stay integers; other values become float32.

        Args:
            packed: per micro-batch, the values of its rows in order.
        """
        floats = packed[0].is_floating_point() or packed[0].dtype == torch.bool
        dtype = torch.float32 if floats else packed[0].dtype
        return self.repack(groups, [values.to(dtype).cpu() for values in packed], range(len(self)))


def pack_whole(
    parts: Sequence[tuple[Tensor, Tensor]],
    pad: int | None,
    columns: Mapping[str, Tensor] | None = None,
    *,
    share_prompts: bool = False,
) -> PackedMicroBatch:
    """Pack whole sequences with one output each, at the position of transformers' sequence classification models.

    That position is the sequence's last token that is not ``pad``; later tokens cannot change the output.

    Args:
        parts: token ids of each sequence in two parts; the first part is not empty.
        pad: the model's padding token; None: it has none, and the last token is used.
        columns: further inputs of the loss, one number per sequence.
        share_prompts: compute a first part once if several sequences have it.
    """
    return PackedMicroBatch.from_rows(
        [_without_padding(first, rest, pad) for first, rest in parts], columns, share_prompts=share_prompts, at_end=True
    )


def _without_padding(first: Tensor, rest: Tensor, pad: int | None) -> tuple[Tensor, Tensor]:
    if pad is None:
        return first, rest
    real = (torch.cat([first, rest]) != pad).nonzero().flatten()
    length = int(real[-1]) + 1 if len(real) else 1
    return first[:length], rest[: max(0, length - len(first))]


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
