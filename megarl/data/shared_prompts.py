"""Shared prompts: plans that place samples of one prompt in one micro-batch, so that the prompt is computed once.

A causal model gives the tokens of a prompt the same hidden states for every response. All layers except attention can
therefore compute the prompt once for all its samples in a micro-batch. The plans place samples of one prompt on one
data-parallel rank and in one micro-batch. The packed engine shares longer beginnings, too, such as the turns that two
branches of a conversation have in common: a micro-batch has at most the tokens that its plan counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.data.balance import balanced_partition, fewest_micro_batches
from megarl.data.protocol import sequence_lengths

if TYPE_CHECKING:
    from megarl.data.protocol import DataProto


DIGESTS = "prompt_digests"
"""Column with a digest of each row's prompt."""


def prompt_digests(prompts: Iterable[np.ndarray | Sequence[float]]) -> Tensor:
    """Compute the column :data:`DIGESTS` of token ids, ``[b]`` int64."""
    digests = (blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=8).digest() for prompt in prompts)
    return torch.from_numpy(np.frombuffer(b"".join(digests), np.int64).copy())


class CostModel(Protocol):
    """Cost of a sequence: of its tokens, and of their attention; ``models.sequence_cost.SequenceCost`` is one."""

    @property
    def linear(self) -> float:
        """Cost per token."""

    def attention(self, length: int) -> float:
        """Cost of attention within a sequence of ``length`` tokens."""


@dataclass(frozen=True)
class SharedPromptRows:
    """Lengths of rows by prompt, and their cost if each prompt of a micro-batch is computed once.

    Attributes:
        prompt_ids: a number per row, equal for rows of the same prompt.
    """

    prompt_lengths: Sequence[int]
    response_lengths: Sequence[int]
    prompt_ids: Sequence[int]

    @classmethod
    def of(cls, batch: DataProto, routes: Sequence[Tensor] | None = None) -> SharedPromptRows:
        """Read the rows of a batch with ``prompts``, ``responses`` and ``attention_mask``.

        With ``prompt_digests`` it does not read the tokens of the prompts, which may be in other processes.

        Args:
            routes: per row ``[tokens, ...]`` experts to replay. Only prompts with equal experts are computed once.
        """
        prompt_lengths, response_lengths = (lengths.tolist() for lengths in sequence_lengths(batch))
        numbers: dict[Hashable, int] = {}
        keys: Iterable[Hashable]
        if DIGESTS in batch.tensors:
            keys = batch.tensors[DIGESTS].tolist()
        else:
            keys = (prompt.cpu().numpy().tobytes() for prompt in batch.unpadded("prompts"))
        if routes is not None:
            experts = (of_row[:length].numpy().tobytes() for of_row, length in zip(routes, prompt_lengths, strict=True))
            keys = zip(keys, experts, strict=True)
        return cls(prompt_lengths, response_lengths, [numbers.setdefault(key, len(numbers)) for key in keys])

    def by_prompt(self, rows: Sequence[int]) -> list[list[int]]:
        """Group ``rows`` by prompt, in the order of their first row."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.prompt_ids[row], []).append(row)
        return list(groups.values())

    def tokens(self, rows: Sequence[int]) -> int:
        """Count the tokens computed for ``rows`` in one micro-batch."""
        prompts = {self.prompt_ids[row]: self.prompt_lengths[row] for row in rows}
        return sum(prompts.values()) + sum(self.response_lengths[row] for row in rows)

    def cost(self, rows: Sequence[int], cost: CostModel) -> float:
        """Estimate the cost of ``rows`` in one micro-batch, with attention over complete sequences."""
        attention = sum(cost.attention(self.prompt_lengths[row] + self.response_lengths[row]) for row in rows)
        return cost.linear * self.tokens(rows) + attention


def micro_batch_units(rows: SharedPromptRows, chosen: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group rows of one prompt into units that stay in one micro-batch, within the token budget.

    If the units need more micro-batches than single rows do, every row is a separate unit.

    Returns:
        Row numbers of each unit; every chosen row is in one unit. Each single row must fit ``max_tokens``.
    """
    units = []
    for samples in rows.by_prompt(chosen):
        unit: list[int] = []
        for row in samples:
            if unit and rows.tokens([*unit, row]) > max_tokens:
                units.append(unit)
                unit = []
            unit.append(row)
        units.append(unit)
    single = [[row] for row in chosen]
    if _needed(rows, units, max_tokens) > _needed(rows, single, max_tokens):
        return single
    return units


def split_units(units: Sequence[list[int]], count: int) -> list[list[int]]:
    """Halve the units with the most rows until there are ``count``, or until each unit is one row."""
    parts = [list(unit) for unit in units]
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        rows = parts[largest]
        if len(rows) == 1:
            break
        parts[largest] = rows[: len(rows) // 2]
        parts.append(rows[len(rows) // 2 :])
    return parts


def partition_by_prompt(
    rows: SharedPromptRows, cost: CostModel, dp: int, mini_batch_rows: int, *, equal: bool
) -> list[list[int]] | None:
    """Assign rows to data-parallel ranks with similar cost, all samples of a prompt to one rank.

    Mini-batches are balanced separately.

    Args:
        equal: every rank must get the same number of rows of each mini-batch.

    Returns:
        Row numbers of each rank, mini-batch by mini-batch; None with too few prompts, if no prompt has several rows,
        or if equal counts are impossible.
    """
    if len(set(rows.prompt_ids)) == len(rows.prompt_ids):
        return None
    plan: list[list[int]] = [[] for _ in range(dp)]
    for start in range(0, len(rows.prompt_ids), mini_batch_rows):
        groups = rows.by_prompt(range(start, start + mini_batch_rows))
        if len(groups) < dp or (equal and (len(groups) % dp or len(set(map(len, groups))) > 1)):
            return None
        costs = [rows.cost(group, cost) for group in groups]
        for rank, part in enumerate(balanced_partition(costs, dp, equal_size=equal)):
            plan[rank] += sorted(row for index in part for row in groups[index])
    return plan


def _needed(rows: SharedPromptRows, units: Sequence[Sequence[int]], max_tokens: int) -> int:
    return fewest_micro_batches([rows.tokens(unit) for unit in units], max_tokens=max_tokens)
