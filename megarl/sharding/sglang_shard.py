"""The parameters of SGLang's ranks under the names of the weight map.

SGLang pads the vocabulary to a multiple of 64 before it divides the rows; the reshard plan does the same. For latent
attention with a query latent, SGLang stores both projections into latents in one parameter: the rows of
``kv_a_proj_with_mqa`` follow those of ``q_a_proj``. In models with gated delta nets the parameters of full attention
belong to the layer itself, without ``self_attn``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import LocalParam, ModelConfig, WeightMap
from megarl.models.declaration import FP8_BLOCK
from megarl.models.number_formats import FP8_DTYPE, quantize_blocks, scales_shape
from megarl.sharding.quantization import MatrixId

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this."""

VOCAB_PARAMS = ("model.embed_tokens.weight", "lm_head.weight")

QUERY_LATENT, KEY_VALUE_LATENT = ".self_attn.q_a_proj.weight", ".self_attn.kv_a_proj_with_mqa.weight"
FUSED_LATENTS = ".self_attn.fused_qkv_a_proj_with_mqa.weight"

ALWAYS_FLOAT32 = (".linear_attn.A_log", ".self_attn.sinks", ".w13_weight_bias", ".w2_weight_bias")
"""Ends of the names of parameters that SGLang holds in float32 in every dtype, sinks depending on its kernels."""
SCALES = "_scale_inv"
"""End of the name of a parameter's scales."""
UNUSED_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of parameters that SGLang adds for a KV cache in FP8; they stay 1."""


@dataclass(frozen=True)
class SGLangShard:
    """The part of a model in one of SGLang's ranks; can be sent to its process.

    Names, shapes and places of parameters follow from the attributes, and are computed once: large models have many.
    SGLang's tensors are looked up at each use, because it may free or replace them between weight syncs.

    Attributes:
        quantized: the matrices of linear layers are in blockwise FP8.
    """

    config: ModelConfig
    tp: int
    rank: int
    quantized: bool = False

    def params(self) -> Sequence[LocalParam]:
        """Return the parameters of the rank in the weight map.

        Raises:
            ValueError: the model does not divide over the ranks.
        """
        return self._params

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the attributes; the receiver computes the parameters."""
        return type(self), (self.config, self.tp, self.rank, self.quantized)

    @cached_property
    def _params(self) -> tuple[LocalParam, ...]:
        return tuple(WeightMap(self.config).rollout_params(self.tp, self.rank, vocab_multiple=VOCAB_MULTIPLE))

    def views(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Return views of the rank's parameters under the names of the weight map, without vocabulary padding.

        Raises:
            WeightSyncError: SGLang lacks a parameter, has another one, or holds one in another shape.
        """
        held = {name: param.data for name, param in model.named_parameters()}
        places = self._places
        shapes = self._shapes(places)
        for name, shape in shapes.items():
            if name not in held:
                raise WeightSyncError(f"SGLang has no parameter '{name}'", code="sglang.parameter-missing")
            if list(held[name].shape) != shape:
                raise WeightSyncError(
                    f"SGLang holds '{name}' with shape {list(held[name].shape)}, expected {shape}",
                    code="sglang.parameter-shape",
                )
        extra = sorted(name for name in held if name not in shapes and not self._is_unused(name))
        if extra:
            raise WeightSyncError(
                f"SGLang has a parameter '{extra[0]}' without weights in the update", code="sglang.parameter-extra"
            )
        return {name: held[place.name][place.first :][: place.rows] for name, place in places.items()}

    def quantized_views(self, model: torch.nn.Module, views: Mapping[str, Tensor]) -> QuantizedViews:
        """Return views of codes and scales of the rank's quantized matrices.

        Raises:
            WeightSyncError: SGLang holds them in another format.
        """
        held, fused = {name: param.data for name, param in model.named_parameters()}, _fused_latents(views)
        scales = {}
        for name in self._quantized(views):
            owner, row = fused.get(name, (name, 0))
            *stack, height, _ = scales_shape(views[name].shape)
            first = row // FP8_BLOCK
            scales[name] = held[owner + SCALES] if stack else held[owner + SCALES][first : first + height]
        result = QuantizedViews({name: views[name] for name in scales}, scales)
        result.check()
        return result

    def clear_padding(self, model: torch.nn.Module) -> None:
        """Fill the vocabulary padding of the rank, and parameters of other ranks, with zeros."""
        held = dict(model.named_parameters())
        for name, place in self._places.items():
            if name in VOCAB_PARAMS:
                held[name].data[place.rows :].zero_()
        for param in self.params():
            if not param.pieces and param.name not in VOCAB_PARAMS:
                held[param.name].data.zero_()

    @cached_property
    def _places(self) -> dict[str, _Rows]:
        params = self.params()
        fused = _fused_latents({param.name: param for param in params})
        named = {param.name: self._name(param.name) for param in params}
        return {
            param.name: _Rows(*fused.get(param.name, (named[param.name], 0)), param.shape[0], param.shape[1:])
            for param in params
        }

    def _name(self, name: str) -> str:
        """Return SGLang's name of a parameter of the weight map that is not fused with another."""
        return name if self.config.linear is None else name.replace(".self_attn.", ".")

    def _shapes(self, places: Mapping[str, _Rows]) -> dict[str, list[int]]:
        """Return the shapes of SGLang's parameters, with padding."""
        padded = -(-self.config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // self.tp
        shapes = {}
        for place in places.values():
            # The parts of a fused parameter are in row order, so the last one's end is the number of rows.
            rows = padded if place.name in VOCAB_PARAMS else place.first + place.rows
            shapes[place.name] = [rows, *place.rest]
        quantized = {places[name].name for name in self._quantized(places)}
        return shapes | {name + SCALES: list(scales_shape(tuple(shapes[name]))) for name in quantized}

    def _quantized(self, names: Iterable[str]) -> list[str]:
        return list(filter(WeightMap(self.config).is_linear, names)) if self.quantized else []

    def _is_unused(self, name: str) -> bool:
        return self.quantized and name.endswith(UNUSED_SCALES)


class _Rows(NamedTuple):
    """Rows ``[first, first + rows)`` of SGLang's parameter ``name``; ``rest`` is the shape of a row."""

    name: str
    first: int
    rows: int
    rest: tuple[int, ...]


def _fused_latents(params: Mapping[str, LocalParam] | Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return SGLang's fused parameter and the first row in it, by name in the weight map."""
    fused = {}
    for name, param in params.items():
        layer = name.removesuffix(QUERY_LATENT)
        if layer != name:
            fused[name] = (layer + FUSED_LATENTS, 0)
            fused[layer + KEY_VALUE_LATENT] = (layer + FUSED_LATENTS, param.shape[0])
    return fused


class QuantizedViews(NamedTuple):
    """Views of the quantized matrices of a rank, by their names in the weight map; stacked for experts.

    Attributes:
        codes: e4m3 ``[rows, columns]``.
        scales: float32, one per block.
    """

    codes: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]

    def check(self) -> None:
        """Check the dtypes of codes and scales.

        Raises:
            WeightSyncError: SGLang holds a parameter in another format, such as scales that are powers of two.
        """
        for name, codes in self.codes.items():
            if codes.dtype != FP8_DTYPE:
                raise WeightSyncError(
                    f"SGLang holds '{name}' as {codes.dtype}, expected {FP8_DTYPE} for {QUANTIZATION_KEY}={FP8}",
                    code="sglang.fp8-codes",
                )
            scales = self.scales[name]
            if scales.dtype != torch.float32:
                raise WeightSyncError(
                    f"SGLang holds the scales of '{name}' as {scales.dtype}: powers of two (ue8m0), which megarl does "
                    f"not write. Choose another kernel with server_args.fp8_gemm_runner_backend, such as triton, or "
                    f"set {QUANTIZATION_KEY}=null",
                    code="sglang.fp8-scales",
                )

    def incoming(self, matrix: MatrixId, dtype: torch.dtype) -> Tensor:
        """Allocate memory for the unquantized weights of a matrix."""
        return torch.empty_like(self._select(self.codes, matrix), dtype=dtype)

    def store(self, matrix: MatrixId, weights: Tensor) -> Tensor:
        """Write codes and scales of a complete matrix; see :class:`~megarl.sharding.quantization.MatrixStorage`."""
        quantized = quantize_blocks(weights)
        self._select(self.codes, matrix).copy_(quantized.codes)
        self._select(self.scales, matrix).copy_(quantized.scales)
        return quantized.finite

    def _select(self, tensors: Mapping[str, Tensor], matrix: MatrixId) -> Tensor:
        name, number = matrix
        return tensors[name] if number is None else tensors[name][number]
