"""Packing of preference pairs: both sequences of a pair are in one micro-batch, the chosen one first."""

from __future__ import annotations

from torch import Tensor

from megarl.data import DataProto
from megarl.workers.rows import PackedRows

PAIRS = ("chosen", "rejected", "attention_mask")
"""Columns required to pack pairs."""


class PairRows(PackedRows):
    """Rows that are pairs; a pair's tokens are those of both sequences.

    Args:
        batch: needs the columns of :data:`PAIRS`.
        share: compute the common first tokens of a pair once.
    """

    def __init__(self, batch: DataProto, *, share: bool) -> None:
        super().__init__(batch)
        self.share = share

    def sequences(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the token ids of the chosen and of the rejected sequence of a pair, without padding."""
        chosen, rejected = self.batch.tensors["chosen"], self.batch.tensors["rejected"]
        start, stop = chosen.shape[1] - self.prompt_lengths[row], self.response_lengths[row]
        return chosen[row, start:], rejected[row, :stop]
