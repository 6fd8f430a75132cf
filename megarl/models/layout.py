"""How one role's model is spread over its processes."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple


class RankCoordinate(NamedTuple):
    """Position of one process in a layout."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


class ExpertCoordinate(NamedTuple):
    """Position of one process among those that share a stage's experts."""

    etp: int
    ep: int
    edp: int


class ParallelLayout(NamedTuple):
    """Parallel sizes of one role, and how its pipeline cuts the layers.

    Ranks are numbered in Megatron's default order ``tp-cp-ep-dp-pp``: tensor parallel fastest, pipeline slowest. The
    experts of a mixture-of-experts layer are laid over the same ranks of a stage anew: ``etp`` ranks share an expert,
    ``ep`` such groups divide the experts, and what is left are replicas.

    Attributes:
        tp: ranks that share each layer.
        pp: pipeline stages.
        dp: ranks that see different data.
        cp: ranks that share each sequence.
        ep: groups of ranks that divide the experts.
        etp: ranks that share each expert; 0 = as ``tp``.
        vpp: chunks of layers per stage (interleaved schedule).
        first_stage_layers: layers of the first stage; None = as the others.
        last_stage_layers: layers of the last stage; None = as the others.
        embedding_as_layer: the embedding takes the place of one layer in the even split.
        loss_as_layer: likewise the output layer and the loss.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_as_layer: bool = False
    loss_as_layer: bool = False

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.ranks_per_stage * self.pp

    @property
    def ranks_per_stage(self) -> int:
        """Number of processes that hold some part of the same layers."""
        return self.tp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.ranks_per_stage // (self.expert_tp * self.ep)

    def coordinate(self, rank: int) -> RankCoordinate:
        """Coordinate of a rank.

        Raises:
            IndexError: the rank is outside ``[0, world_size)``.
        """
        self._check_rank(rank)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoordinate(tp, dp, pp, cp)

    def expert_coordinate(self, rank: int) -> ExpertCoordinate:
        """Coordinate of a rank among the experts of its stage.

        Raises:
            IndexError: the rank is outside ``[0, world_size)``.
        """
        self._check_rank(rank)
        rest, etp = divmod(rank % self.ranks_per_stage, self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return ExpertCoordinate(etp, ep, edp)

    def rank(self, *, tp: int = 0, dp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """Rank at a coordinate; the inverse of :meth:`coordinate`."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def chunk_sizes(self, num_layers: int) -> list[int]:
        """Layers of every chunk of the pipeline, in the order in which a sequence passes through them.

        Chunk ``c`` is the ``c // pp``-th chunk of stage ``c % pp``.

        Raises:
            ValueError: the layers do not divide over stages and chunks.
        """
        totals = self._stage_totals(num_layers)
        if any(total < 0 or total % self.vpp for total in totals):
            raise ValueError(f"stages of {totals} layers do not divide into {self.vpp} chunks each")
        sizes = [total // self.vpp for total in totals] * self.vpp
        sizes[0] -= self.embedding_as_layer
        sizes[-1] -= self.loss_as_layer
        if min(sizes) < 0 or sum(sizes) != num_layers:
            raise ValueError(f"chunks of {sizes} layers do not make {num_layers}")
        return sizes

    def layers(self, num_layers: int, pp_rank: int, chunk: int = 0) -> range:
        """Global numbers of the decoder layers in one chunk of a pipeline stage."""
        sizes = self.chunk_sizes(num_layers)
        index = chunk * self.pp + pp_rank
        ends = list(accumulate(sizes))
        return range(ends[index] - sizes[index], ends[index])

    def stage_layers(self, num_layers: int, pp_rank: int) -> list[int]:
        """Global numbers of all decoder layers that a pipeline stage holds, chunk after chunk."""
        return [layer for chunk in range(self.vpp) for layer in self.layers(num_layers, pp_rank, chunk)]

    def describe(self) -> str:
        """Short form for logs, such as ``TP2 PP1 DP4``; sizes beyond these three only where they differ from 1."""
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        parts += [f"{name}{size}" for name, size in (("CP", self.cp), ("EP", self.ep), ("VPP", self.vpp)) if size > 1]
        if self.expert_tp != self.tp:
            parts.append(f"ETP{self.expert_tp}")
        return " ".join(parts)

    def _stage_totals(self, num_layers: int) -> list[int]:
        """Layers of every stage, embedding and loss counted where they are to be.

        Raises:
            ValueError: what the first and the last stage leave does not divide over the others.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        fixed = [size for size in (first, last) if size is not None]
        left = num_layers + self.embedding_as_layer + self.loss_as_layer - sum(fixed)
        others = self.pp - len(fixed)
        if others < 0 or left < 0 or (left % others if others else left):
            raise ValueError(f"{left} layers do not divide over {others} stages")
        middle = [left // others] * others if others else []
        return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} outside layout {self.describe()} of {self.world_size} processes")
