"""Packed micro-batches: sequences laid end to end, with the bookkeeping that finds the response tokens again.

Every response token is predicted at the position before it. A micro-batch knows those positions, so that outputs
come back as one flat tensor over response tokens, row after row, and split by ``response_lengths``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megarl.errors import DataError


@dataclass(frozen=True)
class PackedMicroBatch:
    """Some rows of a batch without a padding token.

    Sequences are stored in order of length, so that those of equal length lie together (the CPU's attention computes
    each such run at once). Whatever a caller sees, ``response_lengths``, outputs and ``columns``, is in the order in
    which the rows were given.

    Attributes:
        tokens: ``[tokens]`` int64, all sequences, prompt and response.
        lengths: tokens of each sequence, in stored order.
        predictors: ``[response tokens]`` int64, for each response token the index in ``tokens`` of the one before it.
        targets: ``[response tokens]`` int64, the response tokens themselves.
        response_lengths: response tokens of each row.
        columns: what a loss needs besides: any number of ``[response tokens, ...]`` tensors by name.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    predictors: Tensor
    targets: Tensor
    response_lengths: tuple[int, ...]
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_rows(
        cls, rows: Sequence[tuple[Tensor, Tensor]], columns: Mapping[str, Tensor] | None = None
    ) -> PackedMicroBatch:
        """Packs rows.

        Args:
            rows: prompt and response token ids of each row, 1-D; a response may be empty, a prompt may not.
            columns: tensors over the response tokens of all rows, one row after the other.

        Raises:
            DataError: there is no row, a prompt is empty, or a column has another number of entries than there are
                response tokens.
        """
        if not rows:
            raise DataError("a micro-batch needs at least one row")
        prompt_lengths = [len(prompt) for prompt, _ in rows]
        response_lengths = tuple(len(response) for _, response in rows)
        if 0 in prompt_lengths:
            raise DataError(f"row {prompt_lengths.index(0)} of a micro-batch has no prompt token to predict from")
        lengths = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
        stored = sorted(range(len(rows)), key=lengths.__getitem__)
        first_token = _starts(lengths, stored)
        predictors = ranges([f + p - 1 for f, p in zip(first_token, prompt_lengths, strict=True)], response_lengths)
        for name, column in (columns or {}).items():
            if len(column) != len(predictors):
                raise DataError(f"column '{name}' has {len(column)} entries for {len(predictors)} response tokens")
        return cls(
            tokens=torch.cat([part for row in stored for part in rows[row]]).to(torch.int64),
            lengths=tuple(lengths[row] for row in stored),
            predictors=predictors,
            targets=torch.cat([response for _, response in rows]).to(torch.int64),
            response_lengths=response_lengths,
            columns=dict(columns or {}),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens computed, prompts included."""
        return len(self.tokens)

    @property
    def num_response_tokens(self) -> int:
        """Tokens predicted."""
        return len(self.targets)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Cuts ``values [response tokens, ...]`` into one tensor per row."""
        return values.split(self.response_lengths)

    def to(self, device: torch.device) -> PackedMicroBatch:
        """The same with its tensors on ``device``."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """``start, start + 1, ..., start + length - 1`` for each pair, one after the other, int64."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    before = torch.tensor(starts, dtype=torch.int64) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + before.repeat_interleave(counts)


def _starts(lengths: Sequence[int], stored: Sequence[int]) -> list[int]:
    """Index of the first token of each row when rows are laid end to end in ``stored`` order."""
    starts, offset = [0] * len(lengths), 0
    for row in stored:
        starts[row] = offset
        offset += lengths[row]
    return starts
