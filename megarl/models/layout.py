"""How one role's model is spread over its processes."""

from __future__ import annotations

from typing import NamedTuple


class RankCoordinate(NamedTuple):
    """Position of one process in a layout."""

    tp: int
    dp: int
    pp: int


class ParallelLayout(NamedTuple):
    """Tensor-, pipeline- and data-parallel sizes of one role.

    Ranks are numbered in Megatron's default order ``tp-cp-ep-dp-pp``: tensor parallel fastest, pipeline slowest.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.dp

    def coordinate(self, rank: int) -> RankCoordinate:
        """Coordinate of a rank.

        Raises:
            IndexError: the rank is outside ``[0, world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} outside layout {self} of {self.world_size} processes")
        return RankCoordinate(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp))

    def rank(self, *, tp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Rank at a coordinate; the inverse of :meth:`coordinate`."""
        return tp + self.tp * (dp + self.dp * pp)

    def layers(self, num_layers: int, pp_rank: int) -> range:
        """Global numbers of the decoder layers that a pipeline stage holds (even split)."""
        per_stage = num_layers // self.pp
        return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)

    def describe(self) -> str:
        """Short form for logs, such as ``TP2 PP1 DP4``."""
        return f"TP{self.tp} PP{self.pp} DP{self.dp}"
