"""The parameters of SGLang's ranks under the names of the weight map, and the models whose form they keep.

SGLang pads the vocabulary to a multiple of 64 before it divides the rows; the reshard plan does the same. For latent
attention with a query latent, SGLang stores both projections into latents in one parameter: the rows of
``kv_a_proj_with_mqa`` follow those of ``q_a_proj``. In models with gated delta nets the parameters of full attention
belong to the layer itself, without ``self_attn``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.base.errors import ModelError, WeightSyncError
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import LocalParam, ModelConfig, WeightMap
from megarl.models.declaration import FP8_BLOCK
from megarl.models.number_formats import FP8_DTYPE, quantize_blocks, scales_shape
from megarl.models.rope import attention_factor
from megarl.rollout.interface import EngineOptions
from megarl.rollout.quantization import MatrixId, check_blocks
from megarl.rollout.sglang.model_arguments import model_arguments, positions_of_full_attention

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this."""

CPU_MULTIPLE = 32
"""On a CPU SGLang pads the width of a rank's MLP to a multiple of this."""

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
        config: the model.
        tp: ranks of the engine.
        rank: the rank.
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

        Args:
            model: SGLang's model in the rank.
            views: result of :meth:`views`.

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
        """Select the parameters of the weight map that are in FP8."""
        return list(filter(WeightMap(self.config).is_linear, names)) if self.quantized else []

    def _is_unused(self, name: str) -> bool:
        return self.quantized and name.endswith(UNUSED_SCALES)


class _Rows(NamedTuple):
    """Rows ``[first, first + rows)`` of SGLang's parameter ``name``; ``rest`` is the shape of a row."""

    name: str
    first: int
    rows: int
    rest: tuple[int, ...]


def check_model_runs(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models that SGLang does not support on such a replica, or stores in another form.

    Raises:
        ModelError: names the part or the size.
    """
    tp = options.tensor_parallel_size
    if config.latent is not None and config.num_attention_heads % tp:
        raise ModelError(
            f"rollout engine 'sglang' over {tp} ranks needs num_attention_heads to be a multiple of {tp}, "
            f"{config.architecture} has {config.num_attention_heads}: a rank has whole heads of latent attention",
            code="layout.rollout-heads",
        )
    if options.quantization is not None:
        check_quantization(config, options)
    model_arguments(config, getattr(options, "server_args", {}))
    _check_olmo_and_gemma(config, options)
    _check_positions(config)
    if config.linear is not None:
        _check_linear(config, options)
    if config.sinks:
        _check_sinks(config, options)
    if options.device == "cpu":
        check_cpu_sizes(config, tp)


def _check_olmo_and_gemma(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse forms of Gemma 3, OLMoE and OLMo 3 that SGLang does not divide over ranks or reads otherwise."""
    tp, name = options.tensor_parallel_size, config.architecture
    if name == "Gemma3ForCausalLM" and tp > 1:
        raise ModelError(
            f"rollout engine 'sglang' does not divide the embedding of {name} over {tp} ranks: set "
            "rollout.tensor_model_parallel_size=1",
            code="sglang.gemma-ranks",
        )
    if name == "OlmoeForCausalLM" and (tp > 1 or config.num_key_value_heads != config.num_attention_heads):
        raise ModelError(
            f"rollout engine 'sglang' norms the queries and keys of {name} over all heads of one rank: it needs "
            f"rollout.tensor_model_parallel_size=1 (here {tp}) and as many key-value heads as heads "
            f"(num_key_value_heads={config.num_key_value_heads}, num_attention_heads={config.num_attention_heads})",
            code="sglang.olmoe-ranks",
        )
    if getattr(options, "url", None) and positions_of_full_attention(config) is not None:
        raise ModelError(
            f"rollout.engine_kwargs.sglang.urls: SGLang reads no rotary embedding per kind of layer of {name}. In the "
            "servers' config.json, replace rope_parameters by those of full_attention",
            code="sglang.layer-rope",
        )


def _check_positions(config: ModelConfig) -> None:
    """Refuse a factor of YaRN that SGLang does not read; for latent attention it computes the factor as DeepSeek."""
    scaling = config.rope_scaling or {}
    if config.latent is None and scaling.get("rope_type") == "yarn" and scaling.get("attention_factor") is not None:
        factor = attention_factor(config)
        default = attention_factor(replace(config, rope_scaling={**scaling, "attention_factor": None}))
        if not math.isclose(factor, default, rel_tol=1e-6):
            raise ModelError(
                f"rollout engine 'sglang' reads no attention_factor={factor:g} of YaRN in {config.architecture}, and "
                f"computes {default:g} from the scaling factor; set rollout.name=embedded, or remove attention_factor",
                code="sglang.yarn-factor",
            )


def _check_linear(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models with gated delta nets in a form that SGLang does not have."""
    tp, linear = options.tensor_parallel_size, config.linear
    assert linear is not None
    if options.device == "cpu":
        raise ModelError(
            f"rollout engine 'sglang' does not run {config.architecture} on a CPU: its gated delta nets need a GPU; "
            "set rollout.name=embedded",
            code="sglang.model-needs-gpu",
        )
    if linear.key_heads % tp:
        raise ModelError(
            f"rollout engine 'sglang' over {tp} ranks needs linear_num_key_heads to be a multiple of {tp}, "
            f"{config.architecture} has {linear.key_heads}",
            code="layout.rollout-heads",
        )
    if linear.grouped and (config.experts is None or not all(config.experts.layers)):
        raise ModelError(
            f"rollout engine 'sglang' does not run {config.architecture} with dense layers: SGLang has experts in "
            "every layer of this architecture; set rollout.name=embedded",
            code="sglang.dense-layers",
        )


def _check_sinks(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse gpt-oss where SGLang has no kernels for it, or would hold quantized weights."""
    if options.device == "cpu":
        raise ModelError(
            f"rollout engine 'sglang' does not run {config.architecture} on a CPU: its attention sinks need a GPU; "
            "set rollout.name=embedded",
            code="sglang.model-needs-gpu",
        )
    if config.quantized:
        raise ModelError(
            f"rollout engine 'sglang' would hold the experts of {config.architecture} in {config.quantized}, and a "
            "weight sync sends plain weights; convert the model folder: megarl convert hf-to-megatron FOLDER ROLE, "
            "then megarl convert megatron-to-hf ROLE NEW_FOLDER",
            code="sglang.quantized-experts",
        )


def check_cpu_sizes(config: ModelConfig, tp: int) -> None:
    """Refuse models that SGLang would pad on a CPU: it needs whole heads and multiples of 32 on every rank.

    Raises:
        ModelError: names the size.
    """
    sizes = {
        "num_attention_heads": (config.num_attention_heads, tp),
        "num_key_value_heads": (config.num_key_value_heads, tp),
        "intermediate_size": (config.ffn_hidden_size, CPU_MULTIPLE * tp),
    }
    if config.experts is not None:
        sizes["moe_intermediate_size"] = (config.experts.ffn_hidden_size, CPU_MULTIPLE * tp)
        sizes["width of shared experts"] = (config.experts.shared_ffn_hidden_size, CPU_MULTIPLE * tp)
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            raise ModelError(
                f"rollout engine 'sglang' on a CPU over {tp} ranks needs {name} to be a multiple of {multiple}, "
                f"{config.architecture} has {size}: SGLang would hold padded weights there",
                code="sglang.cpu-padding",
            )


def _fused_latents(params: Mapping[str, LocalParam] | Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return SGLang's fused parameter and the first row in it, by name in the weight map."""
    fused = {}
    for name, param in params.items():
        layer = name.removesuffix(QUERY_LATENT)
        if layer != name:
            fused[name] = (layer + FUSED_LATENTS, 0)
            fused[layer + KEY_VALUE_LATENT] = (layer + FUSED_LATENTS, param.shape[0])
    return fused


def check_quantization(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models and devices whose weights SGLang would not hold in blockwise FP8, or in another form.

    Raises:
        ModelError: names the key and the reason.
    """
    setting = f"{QUANTIZATION_KEY}={FP8} with rollout.name=sglang"
    if options.device == "cpu":
        raise ModelError(
            f"{setting}: on a CPU SGLang repacks FP8 weights, which a weight sync cannot write; set "
            "rollout.name=embedded, or quantization=null",
            code="sglang.fp8-cpu",
        )
    if options.dtype != "bfloat16":
        raise ModelError(
            f"{setting} and rollout.dtype={options.dtype}: SGLang's FP8 layers compute in bfloat16; set dtype=bfloat16",
            code="sglang.fp8-dtype",
        )
    special = "gated delta nets" if config.linear is not None else "experts with biases" if config.sinks else None
    if special is not None:
        raise ModelError(
            f"{setting} is not supported for the {special} of {config.architecture}; set quantization=null",
            code="sglang.fp8-model",
        )
    if config.latent is not None and config.latent.q_lora_rank % FP8_BLOCK:
        raise ModelError(
            f"{setting}: q_lora_rank={config.latent.q_lora_rank} of {config.architecture} is no multiple of "
            f"{FP8_BLOCK}, and SGLang fuses both latents in one matrix; set quantization=null",
            code="sglang.fp8-latent",
        )
    check_blocks(config, options.tensor_parallel_size)


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
        """Write codes and scales of a complete matrix; see :class:`~megarl.rollout.quantization.MatrixStorage`."""
        quantized = quantize_blocks(weights)
        self._select(self.codes, matrix).copy_(quantized.codes)
        self._select(self.scales, matrix).copy_(quantized.scales)
        return quantized.finite

    def _select(self, tensors: Mapping[str, Tensor], matrix: MatrixId) -> Tensor:
        name, number = matrix
        return tensors[name] if number is None else tensors[name][number]
