"""Parallel layout of a role: tensor, pipeline, context, expert and data parallel sizes, and the pipeline's layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError


class RankCoordinate(NamedTuple):
    """Position of one process in a layout."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


class ExpertCoordinate(NamedTuple):
    """Position of one process among the processes that share a stage's experts."""

    etp: int
    ep: int
    edp: int


class ParallelLayout(NamedTuple):
    """Parallel sizes of one role, and the split of its layers over the pipeline.

    Ranks are numbered in Megatron's default order ``tp-cp-ep-dp-pp``: tensor parallel fastest, pipeline slowest. The
    experts of a mixture-of-experts layer divide the same ranks of a stage in another way: ``etp`` ranks share an
    expert, ``ep`` such groups divide the experts, and the remaining factor counts expert replicas.

    Attributes:
        tp: ranks that share each layer.
        pp: pipeline stages.
        dp: ranks that process different data.
        cp: ranks that share each sequence.
        ep: groups of ranks that divide the experts.
        etp: ranks that share each expert; 0 = same as ``tp``.
        vpp: chunks of layers per stage (interleaved schedule).
        first_stage_layers: layers of the first stage, likewise of the last; None = even split.
        embedding_as_layer: the embedding counts as one layer in the even split.
        loss_as_layer: output layer and loss count as one layer in the even split.
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
        """Number of processes of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.ranks_per_stage // (self.expert_tp * self.ep)

    @property
    def row_divisor(self) -> int:
        """Divisor of a batch's rows if micro-batches may have one row.

        Data-parallel ranks have equal numbers of rows, and the interleaved schedule fills its stages.
        """
        return self.dp * (self.pp if self.vpp > 1 else 1)

    def coordinate(self, rank: int) -> RankCoordinate:
        """Return a rank's coordinate; raises IndexError outside ``[0, world_size)``."""
        self._check_rank(rank)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoordinate(tp, dp, pp, cp)

    def expert_coordinate(self, rank: int) -> ExpertCoordinate:
        """Return a rank's coordinate among its stage's experts; raises IndexError outside ``[0, world_size)``."""
        self._check_rank(rank)
        rest, etp = divmod(rank % self.ranks_per_stage, self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return ExpertCoordinate(etp, ep, edp)

    def rank(self, *, tp: int = 0, dp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """Return the rank at a coordinate; the inverse of :meth:`coordinate`."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def chunk_sizes(self, num_layers: int) -> list[int]:
        """Count the layers of every pipeline chunk, in the order of the forward pass.

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
        """Return the global numbers of the decoder layers in one chunk of a pipeline stage."""
        sizes = self.chunk_sizes(num_layers)
        index = chunk * self.pp + pp_rank
        ends = list(accumulate(sizes))
        return range(ends[index] - sizes[index], ends[index])

    def stage_layers(self, num_layers: int, pp_rank: int) -> list[int]:
        """Return the global numbers of all decoder layers of a pipeline stage, chunk by chunk."""
        return [layer for chunk in range(self.vpp) for layer in self.layers(num_layers, pp_rank, chunk)]

    def describe(self) -> str:
        """Format the layout for logs, such as ``TP2 PP1 DP4``; further sizes only if they differ from 1."""
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        parts += [f"{name}{size}" for name, size in (("CP", self.cp), ("EP", self.ep), ("VPP", self.vpp)) if size > 1]
        if self.expert_tp != self.tp:
            parts.append(f"ETP{self.expert_tp}")
        return " ".join(parts)

    def _stage_totals(self, num_layers: int) -> list[int]:
        """Layers of every stage, with embedding and loss counted as configured.

        Raises:
            ValueError: the layers outside the first and the last stage do not divide over the other stages.
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


def check_pipeline(num_layers: int, layout: ParallelLayout, field: str) -> None:
    """Check that the decoder layers divide over pipeline stages and chunks; ``field`` is the layout's config group.

    Raises:
        ConfigError: they do not; names the most specific key that alone can repair the layout, its value and all valid
            ones.
    """
    if fits_pipeline(num_layers, layout):
        return
    sizes: tuple[int | None, ...] = tuple(range(1, num_layers + 1))
    specific: list[tuple[str, str, Any, tuple[int | None, ...]]] = [
        ("vpp", "virtual_pipeline_model_parallel_size", 1, sizes),
        ("first_stage_layers", "num_layers_in_first_pipeline_stage", None, (None, *sizes)),
        ("last_stage_layers", "num_layers_in_last_pipeline_stage", None, (None, *sizes)),
    ]
    for name, key, default, candidates in specific:
        value = getattr(layout, name)
        valid = _valid_values(num_layers, layout, name, candidates)
        if value != default and valid:
            raise ConfigError(
                f"{field}.{key}={value} does not divide {_layer_count(num_layers, layout)} over "
                f"pipeline_model_parallel_size={layout.pp}; valid for this model: {_listed(valid)}",
                code="layout.pipeline-split",
            )
    stages = range(1, num_layers + layout.embedding_as_layer + layout.loss_as_layer + 1)
    even = layout._replace(vpp=1, first_stage_layers=None, last_stage_layers=None)
    valid = _valid_values(num_layers, layout, "pp", stages) or _valid_values(num_layers, even, "pp", stages)
    problem = "exceeds" if layout.pp > stages[-1] else "does not divide"
    raise ConfigError(
        f"{field}.pipeline_model_parallel_size={layout.pp} {problem} {_layer_count(num_layers, layout)}; "
        f"valid for this model: {_listed(valid)}",
        code="layout.pp-layers",
    )


def fits_pipeline(num_layers: int, layout: ParallelLayout) -> bool:
    """Return whether the layers divide over stages and chunks, and no chunk between the first and the last is empty."""
    if min(layout.pp, layout.vpp) < 1 or (layout.vpp > 1 and layout.pp == 1):
        return False
    try:
        sizes = layout.chunk_sizes(num_layers)
    except ValueError:
        return False
    return sizes[0] + layout.embedding_as_layer > 0 < sizes[-1] + layout.loss_as_layer and all(sizes[1:-1])


def _valid_values(num_layers: int, layout: ParallelLayout, name: str, candidates: Iterable[Any]) -> list[int | None]:
    changes: list[dict[str, Any]] = [{name: value} for value in candidates]
    return [change[name] for change in changes if fits_pipeline(num_layers, layout._replace(**change))]


def _layer_count(num_layers: int, layout: ParallelLayout) -> str:
    counted = [word for word, on in (("embedding", layout.embedding_as_layer), ("loss", layout.loss_as_layer)) if on]
    more = f" (and {' and '.join(counted)}, each as one layer)" if counted else ""
    return f"the model's num_hidden_layers={num_layers}{more}"


def _listed(values: list[int | None]) -> str:
    return ", ".join("null" if value is None else str(value) for value in values)
