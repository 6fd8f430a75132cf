"""Packing of the rows of a batch into micro-batches, and unpacking of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megarl.data import (
    DataProto,
    check_longest,
    common_micro_batch_count,
    fewest_micro_batches,
    plan_micro_batches,
    sequence_lengths,
)
from megarl.data.shared_prompts import SharedPromptRows, micro_batch_units, split_units
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.workers.settings import MicroBatchBudget

SEQUENCES = ("prompts", "responses", "attention_mask")
"""Columns required to pack rows."""
ROUTES = "routed_experts"
"""Column of the experts of each token, for routing replay."""
SAMPLE_IDS = ("uid", "index")
"""Non-tensor columns that identify a sample to the user."""

GatherCounts = Callable[[int], list[int]]


class PackedRows:
    """The rows of a batch, ready to be packed into micro-batches.

    Args:
        batch: needs ``prompts``, ``responses`` and ``attention_mask``; response-aligned columns are read on demand.
    """

    def __init__(self, batch: DataProto, *, share_prompts: bool = False) -> None:
        self.batch = batch
        self.prompt_lengths, self.response_lengths = (lengths.tolist() for lengths in sequence_lengths(batch))
        self._shared = SharedPromptRows.of(batch) if share_prompts else None
        self._unpadded: dict[str, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.batch)

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
            columns: further inputs of the loss, packed over the rows' response tokens.
            at_tokens: read outputs at the response tokens instead of one position before them.
            replay: use the experts of the column :data:`ROUTES`, if the batch has it.
        """
        return PackedMicroBatch.from_rows(
            self.samples(rows),
            columns,
            share_prompts=self._shared is not None,
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
        return pack_whole(self.samples(rows), pad, share_prompts=self._shared is not None)

    def column(self, name: str, rows: Sequence[int]) -> Tensor:
        """Pack a response-aligned column of the rows: ``[sum of response lengths, ...]``."""
        values = self.unpadded(name)
        return torch.cat([values[row] for row in rows])

    def unpadded(self, name: str) -> list[Tensor]:
        """Return the entries of each row of a column, without padding."""
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
