"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) as data: tensors with adapters, and their shards.

DoRA (https://arxiv.org/abs/2402.09353) adds a magnitude M of each row of an adapted weight.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from megarl.base.errors import ConfigError
from megarl.models.hf_folder import is_tower, stacked_parts
from megarl.models.layout import ParallelLayout
from megarl.models.model_config import ModelConfig
from megarl.models.partition import LocalParam, Piece
from megarl.models.tower_class import TOWER
from megarl.models.weight_map import VOCAB_MULTIPLE, Contribution, WeightMap

ALL_LINEAR = "all-linear"
INITIAL_A = ("kaiming", "xavier")
"""Distributions of A's initial values: uniform as in peft, or normal as in Megatron-Bridge."""
LORA, DORA = KINDS = ("lora", "dora")
"""Kinds of adapters: ``W + scale * B A``, or with each row of this sum rescaled to a trained magnitude."""
TOWER_SETTINGS = ("adapt_vision_tower", "freeze_vision_model", "freeze_vision_projection")
"""Settings of adapters that concern a vision tower, by their keys below ``lora``."""
A, B, M = "lora_a", "lora_b", "lora_m"
"""Names of an adapter's parameters inside its layer; only DoRA has M."""
OUTPUT_LAYER = "output_layer"
_ATTENTION = (
    r"self_attention\.(linear_qkv|linear_proj|linear_q_proj|linear_(q|kv)_(down|up)_proj|in_proj_(qkvz|ba)|out_proj)"
)
_MLP = r"mlp\.((shared_experts\.|experts\.local_experts\.\d+\.)?linear_fc[12]|router)"
_LAYER_OF_TOWER = rf"{re.escape(TOWER)}(?!pos_embed).+"
_ADAPTED = re.compile(rf"^(decoder\.layers\.\d+\.({_ATTENTION}|{_MLP})|{OUTPUT_LAYER}|{_LAYER_OF_TOWER})\.weight$")
_BY_NAME_ONLY = ("router", OUTPUT_LAYER)
"""Layers that ``all-linear`` leaves out, as peft leaves out the output layer."""


@dataclass(frozen=True)
class LoraOptions:
    """Options of a model's low-rank adapters.

    Attributes:
        rank: rows of A and columns of B.
        alpha: the adapter's output is multiplied by ``alpha / rank``.
        targets: names of Hugging Face modules or their last parts, such as ``q_proj``; of Megatron's layers, such as
            ``linear_qkv``; or ``all-linear``.
        excludes: names to leave out, likewise.
        rank_stabilized: multiply by ``alpha / sqrt(rank)`` instead (rsLoRA, https://arxiv.org/abs/2312.03732).
        initial_a: distribution of A's initial values, of :data:`INITIAL_A`; B is zero.
        seed: seed of the initial values.
        adapt_vision_tower: the targets include layers of the vision tower.
        freeze_vision_model: leave the vision tower's patch embedding and blocks; otherwise they are trained in full.
        freeze_vision_projection: likewise its mergers.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    excludes: tuple[str, ...] = ()
    rank_stabilized: bool = False
    initial_a: str = INITIAL_A[0]
    seed: int = 0
    kind: str = LORA
    adapt_vision_tower: bool = False
    freeze_vision_model: bool = True
    freeze_vision_projection: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            text = f"lora_rank={self.rank} must be at least 1 (0 = no adapters)"
            raise ConfigError(text, code="adapter.rank-below-one")
        if not self.alpha > 0:
            text = f"lora_alpha={self.alpha} must be above 0: the adapters would have no effect"
            raise ConfigError(text, code="adapter.alpha-not-positive")
        if self.kind not in KINDS:
            raise ConfigError(f"lora.type={self.kind} must be one of {', '.join(KINDS)}", code="adapter.unknown-type")

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def has_magnitudes(self) -> bool:
        """Whether the rows of an adapted weight have trained magnitudes (DoRA)."""
        return self.kind == DORA

    @property
    def tower_keys(self) -> tuple[str, ...]:
        """Settings that train a vision tower, or adapters on it."""
        values = {name: getattr(self, name) for name in TOWER_SETTINGS}
        return tuple(f"lora.{n}={str(v).lower()}" for n, v in values.items() if v != getattr(LoraOptions, n))


class AdapterSplit(Enum):
    """Split of an adapter over the ranks that share its layer."""

    COLUMN = "the layer's outputs are split: A is whole, B and M are split by rows"
    ROW = "the layer's inputs are split: A is split by columns, B and M are whole"
    REPLICATED = "every rank has the whole layer, A, B and M"


class LocalAdapter(NamedTuple):
    """One rank's shards of the adapters of a linear layer; a fused layer has one adapter per Hugging Face tensor.

    Attributes:
        weight: name of the layer's weight in the weight map.
        a: A of each adapter, one below the other, ``[adapters * rank, inputs]``.
        b: B of the adapted rows, ``[rows, rank]``.
        m: magnitudes of the adapted rows, ``[rows]``; None without DoRA.
        rows: adapted rows of the layer, ascending.
        owners: each row's adapter number.
    """

    weight: str
    a: LocalParam
    b: LocalParam
    m: LocalParam | None
    rows: tuple[int, ...]
    owners: tuple[int, ...]
    split: AdapterSplit

    @property
    def params(self) -> tuple[LocalParam, ...]:
        """A, B, and with DoRA M."""
        return (self.a, self.b) if self.m is None else (self.a, self.b, self.m)

    @property
    def is_expert(self) -> bool:
        """Whether the layer belongs to a routed expert."""
        return ".local_experts." in self.weight


class AdapterMap:
    """Weight map of a model's trained parameters: every A, B and M, and weights trained in full.

    Attributes:
        base_shapes: shape of every tensor of the model without adapters.

    Raises:
        ConfigError: a target matches no tensor of the model, or a tensor that cannot have an adapter.
    """

    def __init__(self, weights: WeightMap, options: LoraOptions) -> None:
        self.options = options
        self.model: ModelConfig = weights.config
        self._weights = weights
        self.base_shapes: Mapping[str, tuple[int, ...]] = weights.hf_shapes()
        self._stacked = stacked_parts(weights.config)
        self._check_targets()

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every A, B and M by peft's name, and of the weights trained in full."""
        rank, shapes = self.options.rank, dict[str, tuple[int, ...]]()
        for name in self.targets:
            rows, columns = self.base_shapes[name]
            shapes |= {_hf_name(name, "A"): (rank, columns), _hf_name(name, "B"): (rows, rank)}
            if self.options.has_magnitudes:
                shapes[magnitude_name(name)] = (rows,)
        return shapes | {name: self.base_shapes[name] for name in self.in_full}

    def is_float32(self, hf_name: str) -> bool:
        """Return whether a tensor is float32 in every weight dtype: none is."""
        return False

    @property
    def head(self) -> tuple[str, ...]:
        """Hugging Face tensors of the scalar head; empty for a language model."""
        return tuple(name for name in self.base_shapes if name.startswith("score.")) if self._weights.value_head else ()

    @cached_property
    def in_full(self) -> tuple[str, ...]:
        """Hugging Face tensors that are trained in full: a scalar head, and unfrozen parts of the vision tower."""
        frozen = {True: self.options.freeze_vision_projection, False: self.options.freeze_vision_model}
        tower = (name for name in self.base_shapes if is_tower(self.model, name) and not frozen["merger" in name])
        return (*tower, *self.head)

    def adapters(self, layout: ParallelLayout, rank: int) -> list[LocalAdapter]:
        """Return the adapters of one training rank."""
        return list(filter(None, map(self._adapter, self._weights.megatron_params(layout, rank))))

    def megatron_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """Return the trained parameters of one training rank."""
        held = self._weights.megatron_params(layout, rank)
        added = [param for adapter in map(self._adapter, held) if adapter for param in adapter.params]
        return added + [param for param in held if self._is_in_full(param)]

    def contributions(self, layout: ParallelLayout, rank: int) -> list[Contribution]:
        """Return the :meth:`megatron_params` that a rank contributes to a checkpoint, each element once."""
        result = []
        for contribution in self._weights.contributions(layout, rank):
            param = contribution.param
            if self._is_in_full(param):
                result.append(contribution)
            adapter = self._adapter(param)
            if adapter is None:
                continue
            is_first = (layout.expert_coordinate(rank).etp if adapter.is_expert else layout.coordinate(rank).tp) == 0
            for part in adapter.params:
                split = AdapterSplit.ROW if part is adapter.a else AdapterSplit.COLUMN
                if is_first or adapter.split is split:
                    result.append(contribution._replace(param=part))
        return result

    def check_layout(self, layout: ParallelLayout) -> None:
        """Check that every pipeline stage, and every rank of a split output layer, has an adapter.

        Raises:
            ConfigError: a stage has none: it would have nothing to train.
        """
        for stage in range(layout.pp):
            if not self.megatron_params(layout, stage * layout.ranks_per_stage):
                raise ConfigError(
                    f"target_modules={list(self.options.targets)}: pipeline stage {stage + 1} of {layout.pp} has no "
                    "layer with an adapter; add targets that every stage has, such as all-linear",
                    code="adapter.stage-without-adapter",
                )
        vocab = self._weights.config.vocab_size
        height = -(-vocab // (VOCAB_MULTIPLE * layout.tp)) * VOCAB_MULTIPLE
        if "lm_head.weight" in self.targets and (layout.tp - 1) * height >= vocab:
            raise ConfigError(
                f"target_modules: lm_head of {vocab} rows leaves a rank of tensor_model_parallel_size={layout.tp} "
                "without rows; choose a smaller size",
                code="adapter.lm-head-rows",
            )

    @cached_property
    def targets(self) -> dict[str, None]:
        """Hugging Face tensors with an adapter, in model order."""
        options = self.options
        by_default = {name for name, layer in self._layer_of.items() if layer not in _BY_NAME_ONLY}
        return {
            name: None
            for name, shape in self.base_shapes.items()
            if len(shape) == 2
            and name not in self.in_full
            and (options.adapt_vision_tower or not is_tower(self.model, name))
            and (self._matches(name, options.targets) or (ALL_LINEAR in options.targets and name in by_default))
            and not self._matches(name, options.excludes)
        }

    def _is_in_full(self, param: LocalParam) -> bool:
        return any(piece.hf_name in self.in_full for piece in param.pieces)

    def _adapter(self, param: LocalParam) -> LocalAdapter | None:
        """The adapters of a weight; None without any."""
        if not _ADAPTED.match(param.name):
            return None
        if not (pieces := [piece for piece in param.pieces if piece.hf_name in self.targets]):
            return None
        rank, layer = self.options.rank, param.name.removesuffix(".weight")
        tensors = list(dict.fromkeys(piece.hf_name for piece in pieces))
        first, last = pieces[0].start[1], pieces[0].stop[1]
        a = [Piece(_hf_name(name, "A"), (0, first), (rank, last), (n * rank, 0)) for n, name in enumerate(tensors)]
        b, m, rows, owners = list[Piece](), list[Piece](), list[int](), list[int]()
        for piece in pieces:
            (start, *_), (stop, *_), at = piece.start, piece.stop, len(rows)
            b.append(Piece(_hf_name(piece.hf_name, "B"), (start, 0), (stop, rank), (at, 0)))
            m.append(Piece(magnitude_name(piece.hf_name), (start,), (stop,), (at,)))
            rows += range(piece.at[0], piece.at[0] + stop - start)
            owners += [tensors.index(piece.hf_name)] * (stop - start)
        return LocalAdapter(
            param.name,
            LocalParam(f"{layer}.{A}", (len(tensors) * rank, last - first), tuple(a)),
            LocalParam(f"{layer}.{B}", (len(rows), rank), tuple(b)),
            LocalParam(f"{layer}.{M}", (len(rows),), tuple(m)) if self.options.has_magnitudes else None,
            tuple(rows),
            tuple(owners),
            _split_of(layer),
        )

    @cached_property
    def _layer_of(self) -> Mapping[str, str]:
        """Megatron's name of the layer of each Hugging Face tensor that can have an adapter, such as ``linear_qkv``."""
        params = self._weights.megatron_params(ParallelLayout(), 0)
        return {
            piece.hf_name: param.name.split(".")[-2]
            for param in params
            if _ADAPTED.match(param.name) and len(param.shape) == 2 and not self._is_in_full(param)
            if self.options.adapt_vision_tower or not param.name.startswith(TOWER)
            for piece in param.pieces
            if piece.hf_name != "model.embed_tokens.weight"  # a tied output layer
            if piece.hf_name not in self._stacked  # peft has other adapters for a tensor of all experts
        }

    def _matches(self, hf_name: str, modules: Sequence[str]) -> bool:
        """Whether a tensor belongs to one of the modules, by peft's rule for lists or by Megatron's layer."""
        module, layer = _module(hf_name), self._layer_of.get(hf_name)
        return any(name in (module, layer) or module.endswith(f".{name}") for name in modules)

    def _check_targets(self) -> None:
        keys = self.options.tower_keys
        if keys and self.model.vision is None:
            text = f"{keys[0]} has no effect: {self.model.architecture} has no vision tower; remove the key"
            raise ConfigError(text, code="image.no-tower")
        layers = dict.fromkeys(map(_layer_name, filter(self._layer_of.__contains__, self.base_shapes)))
        for key, names in (("target_modules", self.options.targets), ("exclude_modules", self.options.excludes)):
            for name in names:
                if name != ALL_LINEAR and not any(self._matches(tensor, (name,)) for tensor in self.base_shapes):
                    text = f"{key}: '{name}' matches no layer of the model{_nearest(name, layers)}"
                    raise ConfigError(text, code="adapter.unknown-target")
        refused = [name for name in self.targets if name not in self._layer_of]
        if refused:
            text = f"target_modules: '{_module(refused[0])}' cannot have an adapter; valid: {', '.join(layers)}"
            raise ConfigError(text, code="adapter.unsupported-target")
        if self.options.adapt_vision_tower and not any(is_tower(self.model, name) for name in self.targets):
            of_tower = dict.fromkeys(_layer_name(name) for name in self._layer_of if is_tower(self.model, name))
            raise ConfigError(
                f"lora.adapt_vision_tower=true has no effect: target_modules={list(self.options.targets)} and "
                f"exclude_modules={list(self.options.excludes)} select no frozen layer of the vision tower; set it to "
                f"false, or add layers of the tower to target_modules: {', '.join(of_tower) or 'there is none'}",
                code="adapter.no-tower-target",
            )
        if not self.targets:
            text = f"exclude_modules={list(self.options.excludes)} leaves no layer with an adapter; remove an entry"
            raise ConfigError(text, code="adapter.no-target-left")


def _split_of(layer: str) -> AdapterSplit:
    name = layer.rpartition(".")[2]
    if layer.startswith(TOWER):
        return AdapterSplit.REPLICATED
    if name in ("linear_proj", "out_proj", "linear_fc2"):
        return AdapterSplit.ROW
    return AdapterSplit.REPLICATED if name == "router" or name.endswith("_down_proj") else AdapterSplit.COLUMN


def _nearest(name: str, layers: Iterable[str]) -> str:
    """The rest of a message: the closest valid name, and all of them."""
    valid = list(layers)
    close = difflib.get_close_matches(name, valid, 1, 0.5)
    return (f"; did you mean '{close[0]}'?" if close else ";") + f" valid: {', '.join(valid)}"


def _layer_name(hf_name: str) -> str:
    """The last part of a module's name; with the one before if it is a number."""
    parts = _module(hf_name).split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _module(hf_name: str) -> str:
    return hf_name.removesuffix(".weight")


def magnitude_name(weight: str) -> str:
    """Return peft's name of the magnitudes of a weight's rows."""
    return f"{_module(weight)}.lora_magnitude_vector"


def _hf_name(weight: str, part: str) -> str:
    return f"{_module(weight)}.lora_{part}.weight"
