"""Rows that begin with the same prompt, and the plans that keep them together so that it is computed once.

A causal model gives the tokens of a prompt the same hidden states whatever follows. Where several samples of one prompt
are in one micro-batch, all but attention can therefore compute it once. That is worth it only if they are together:
on one data-parallel rank, and there in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megarl.data.balance import balanced_partition
from megarl.data.packing import fewest_micro_batches
from megarl.data.sequences import sequence_lengths

if TYPE_CHECKING:
    from megarl.data.protocol import DataProto


class Cost(Protocol):
    """Work of sequences: so much per token, so much per pair of tokens."""

    @property
    def linear(self) -> float:
        """Per token."""

    @property
    def quadratic(self) -> float:
        """Per pair of tokens."""


@dataclass(frozen=True)
class SharedPromptRows:
    """Rows by their prompts, and what they cost where each prompt of a micro-batch is computed once.

    Attributes:
        prompt_lengths: tokens of each row's prompt.
        response_lengths: tokens of each row's response.
        families: a number for each row, the same for rows of the same prompt.
    """

    prompt_lengths: Sequence[int]
    response_lengths: Sequence[int]
    families: Sequence[int]

    @classmethod
    def of(cls, batch: DataProto) -> SharedPromptRows:
        """The rows of a batch that has ``prompts``, ``responses`` and ``attention_mask``."""
        prompt_lengths, response_lengths = (lengths.tolist() for lengths in sequence_lengths(batch))
        prompts = batch.tensors["prompts"].cpu().numpy()
        width = prompts.shape[1]
        numbers: dict[bytes, int] = {}
        keys = (prompts[row, width - length :].tobytes() for row, length in enumerate(prompt_lengths))
        return cls(prompt_lengths, response_lengths, [numbers.setdefault(key, len(numbers)) for key in keys])

    def together(self, rows: Sequence[int]) -> list[list[int]]:
        """``rows`` by their prompts, in the order of their first row."""
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(self.families[row], []).append(row)
        return list(found.values())

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens computed for ``rows`` in one micro-batch."""
        prompts = {self.families[row]: self.prompt_lengths[row] for row in rows}
        return sum(prompts.values()) + sum(self.response_lengths[row] for row in rows)

    def cost(self, rows: Sequence[int], cost: Cost) -> float:
        """Work for ``rows`` in one micro-batch: attention is to whole sequences."""
        pairs = sum((self.prompt_lengths[row] + self.response_lengths[row]) ** 2 for row in rows)
        return cost.linear * self.tokens(rows) + cost.quadratic * pairs


def units_of_micro_batches(rows: SharedPromptRows, chosen: Sequence[int], max_tokens: int) -> list[list[int]]:
    """What micro-batches are to be made of: rows of one prompt together, as many as a budget holds.

    Where larger units would need more micro-batches than rows by themselves do, it is these.

    Args:
        rows: all rows.
        chosen: those to compute.
        max_tokens: tokens that a micro-batch may hold; each row alone must fit.

    Returns:
        Row numbers of each unit; every chosen row is in one.
    """
    units = []
    for family in rows.together(chosen):
        unit: list[int] = []
        for row in family:
            if unit and rows.tokens([*unit, row]) > max_tokens:
                units.append(unit)
                unit = []
            unit.append(row)
        units.append(unit)
    single = [[row] for row in chosen]
    if _needed(rows, units, max_tokens) > _needed(rows, single, max_tokens):
        return single
    return units


def divided(units: Sequence[list[int]], count: int) -> list[list[int]]:
    """The units, those of most rows halved until there are ``count``, or until each is one row."""
    parts = [list(unit) for unit in units]
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        rows = parts[largest]
        if len(rows) == 1:
            break
        parts[largest] = rows[: len(rows) // 2]
        parts.append(rows[len(rows) // 2 :])
    return parts


def plan_families(
    rows: SharedPromptRows, cost: Cost, dp: int, mini_batch_rows: int, *, equal: bool
) -> list[list[int]] | None:
    """Assign rows to data-parallel ranks so that those of one prompt are together and ranks have about the same work.

    Args:
        rows: all rows.
        cost: work of sequences.
        dp: number of ranks.
        mini_batch_rows: rows per mini-batch, each of which is balanced for itself.
        equal: every rank must get equally many rows of each mini-batch.

    Returns:
        Row numbers of each rank, mini-batch after mini-batch; None where there are too few prompts, or where equal
        counts do not come out.
    """
    plan: list[list[int]] = [[] for _ in range(dp)]
    for start in range(0, len(rows.families), mini_batch_rows):
        families = rows.together(range(start, start + mini_batch_rows))
        if len(families) < dp or (equal and (len(families) % dp or len(set(map(len, families))) > 1)):
            return None
        costs = [rows.cost(family, cost) for family in families]
        for rank, part in enumerate(balanced_partition(costs, dp, equal_size=equal)):
            plan[rank] += sorted(row for index in part for row in families[index])
    return plan


def _needed(rows: SharedPromptRows, units: Sequence[Sequence[int]], max_tokens: int) -> int:
    return fewest_micro_batches([rows.tokens(unit) for unit in units], max_tokens=max_tokens)
