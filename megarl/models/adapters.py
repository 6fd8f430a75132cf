"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) as data: tensors with adapters, shards, initial values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.base.errors import ConfigError
from megarl.base.seeds import derive_seed
from megarl.models.layout import ParallelLayout
from megarl.models.partition import LocalParam, Piece
from megarl.models.weight_map import Contribution, WeightMap

ALL_LINEAR = "all-linear"
A, B = "lora_a", "lora_b"
"""Names of an adapter's two parameters inside its layer."""
_ADAPTED = re.compile(r"^decoder\.layers\.\d+\.(self_attention\.linear_(qkv|proj)|mlp\.linear_fc[12])\.weight$")


@dataclass(frozen=True)
class LoraOptions:
    """Options of the low-rank adapters of a model.

    Attributes:
        rank: rows of A and columns of B.
        alpha: the adapter's output is multiplied by ``alpha / rank``.
        targets: names of Hugging Face modules, or their last parts, such as ``q_proj``; or ``all-linear``.
        excludes: names to leave out, likewise.
        rank_stabilized: multiply by ``alpha / sqrt(rank)`` instead (rsLoRA, https://arxiv.org/abs/2312.03732).
        seed: seed of the initial values.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    excludes: tuple[str, ...] = ()
    rank_stabilized: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora_rank={self.rank} must be at least 1 (0 = no adapters)")
        if not self.alpha > 0:
            raise ConfigError(f"lora_alpha={self.alpha} must be above 0: the adapters would have no effect")

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class LocalAdapter(NamedTuple):
    """One rank's shards of the adapters of a linear layer; a fused layer has one adapter per Hugging Face tensor.

    Attributes:
        weight: name of the layer's weight in the weight map.
        a: A of each adapter, one below the other, ``[adapters * rank, inputs]``.
        b: rows of B for the adapted rows of the layer, ``[rows, rank]``.
        rows: adapted rows of the layer, ascending.
        owners: number of the adapter of each row.
        splits_inputs: the layer is row-parallel: A is split and B is replicated, otherwise the reverse.
    """

    weight: str
    a: LocalParam
    b: LocalParam
    rows: tuple[int, ...]
    owners: tuple[int, ...]
    splits_inputs: bool


class AdapterMap:
    """Map of the adapters of one model, with the interface of :class:`~megarl.models.WeightMap` for checkpoints.

    Args:
        weights: weight map of the model.
        options: the adapters.

    Raises:
        ConfigError: a target matches no tensor of the model, or a tensor that cannot have an adapter.
    """

    def __init__(self, weights: WeightMap, options: LoraOptions) -> None:
        self.options = options
        self._weights = weights
        self._shapes = weights.hf_shapes()
        self._check_targets()

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every A and B, by the name that peft gives it inside the model."""
        rank, shapes = self.options.rank, dict[str, tuple[int, ...]]()
        for name in self._targets:
            rows, columns = self._shapes[name]
            shapes |= {_hf_name(name, "A"): (rank, columns), _hf_name(name, "B"): (rows, rank)}
        return shapes

    def is_float32(self, hf_name: str) -> bool:
        """Whether a tensor is float32 in every weight dtype: none is."""
        return False

    def adapters(self, layout: ParallelLayout, rank: int) -> list[LocalAdapter]:
        """Adapters of one training rank."""
        return list(filter(None, map(self._adapter, self._weights.megatron_params(layout, rank))))

    def megatron_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """Adapter parameters of one training rank."""
        return [param for adapter in self.adapters(layout, rank) for param in (adapter.a, adapter.b)]

    def contributions(self, layout: ParallelLayout, rank: int) -> list[Contribution]:
        """The subset of :meth:`megatron_params` that a rank can contribute to a checkpoint, each element once."""
        is_first = layout.coordinate(rank).tp == 0
        result = []
        for param, replica, replicas in self._weights.contributions(layout, rank):
            adapter = self._adapter(param)
            if adapter is not None:
                held = ((adapter.a, adapter.splits_inputs), (adapter.b, not adapter.splits_inputs))
                result += [Contribution(part, replica, replicas) for part, is_split in held if is_split or is_first]
        return result

    def initial_a(self, param: LocalParam) -> Tensor:
        """Initial values of a rank's part of A, as peft draws them; those of B are zero.

        Each tensor has a seed of its own, and is drawn whole: the values do not depend on the layout.
        """
        result = torch.zeros(param.shape)
        shapes = self.hf_shapes()
        for piece in param.pieces:
            generator = torch.Generator().manual_seed(derive_seed(self.options.seed, piece.hf_name))
            rows, columns = shapes[piece.hf_name]
            bound = 1 / math.sqrt(columns)
            whole = torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)
            result[piece.at[0] : piece.at[0] + rows] = whole[:, piece.start[1] : piece.stop[1]]
        return result

    def _adapter(self, param: LocalParam) -> LocalAdapter | None:
        """The adapters of a weight; None without any."""
        pieces = [piece for piece in param.pieces if piece.hf_name in self._targets]
        if not pieces or not _ADAPTED.match(param.name):
            return None
        rank, layer = self.options.rank, param.name.removesuffix(".weight")
        tensors = list(dict.fromkeys(piece.hf_name for piece in pieces))
        first, last = pieces[0].start[1], pieces[0].stop[1]
        a = [
            Piece(_hf_name(name, "A"), (0, first), (rank, last), (number * rank, 0))
            for number, name in enumerate(tensors)
        ]
        b: list[Piece] = []
        rows: list[int] = []
        owners: list[int] = []
        for piece in pieces:
            height = piece.shape[0]
            b.append(Piece(_hf_name(piece.hf_name, "B"), (piece.start[0], 0), (piece.stop[0], rank), (len(rows), 0)))
            rows += range(piece.at[0], piece.at[0] + height)
            owners += [tensors.index(piece.hf_name)] * height
        return LocalAdapter(
            param.name,
            LocalParam(f"{layer}.{A}", (len(tensors) * rank, last - first), tuple(a)),
            LocalParam(f"{layer}.{B}", (len(rows), rank), tuple(b)),
            tuple(rows),
            tuple(owners),
            last - first < self._shapes[tensors[0]][1],
        )

    @cached_property
    def _linear(self) -> frozenset[str]:
        """Hugging Face tensors that can have an adapter."""
        params = self._weights.megatron_params(ParallelLayout(), 0)
        return frozenset(piece.hf_name for param in params if _ADAPTED.match(param.name) for piece in param.pieces)

    @cached_property
    def _targets(self) -> dict[str, None]:
        """Hugging Face tensors with an adapter, in the order of the model."""
        options = self.options
        return {
            name: None
            for name, shape in self._shapes.items()
            if len(shape) == 2
            and (_matches(name, options.targets) or (ALL_LINEAR in options.targets and name in self._linear))
            and not _matches(name, options.excludes)
        }

    def _check_targets(self) -> None:
        config, options = self._weights.config, self.options
        if config.latent is not None or config.experts is not None:
            kind = "experts" if config.experts is not None else "latent attention"
            raise ConfigError(f"lora_rank={options.rank}: adapters do not support models with {kind}; set lora_rank=0")
        if self._weights.value_head:
            raise ConfigError(f"lora_rank={options.rank}: adapters do not support a value head; set lora_rank=0")
        valid = ", ".join(dict.fromkeys(name.split(".")[-2] for name in self._shapes if name in self._linear))
        for target in options.targets:
            if target != ALL_LINEAR and not any(_matches(name, (target,)) for name in self._shapes):
                raise ConfigError(f"target_modules: '{target}' matches no layer of the model; valid: {valid}")
        refused = [name for name in self._targets if name not in self._linear]
        if refused:
            raise ConfigError(f"target_modules: '{_module(refused[0])}' cannot have an adapter; valid: {valid}")
        if not self._targets:
            raise ConfigError(f"exclude_modules={list(options.excludes)} leaves no layer with an adapter")


def _matches(hf_name: str, modules: Sequence[str]) -> bool:
    """Whether a tensor belongs to one of the modules; peft's rule for lists."""
    module = _module(hf_name)
    return any(module == name or module.endswith(f".{name}") for name in modules)


def _module(hf_name: str) -> str:
    return hf_name.removesuffix(".weight")


def _hf_name(weight: str, part: str) -> str:
    return f"{_module(weight)}.lora_{part}.weight"
