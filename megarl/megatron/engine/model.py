"""The model of one pipeline stage: Megatron's decoder over packed sequences, and the layer specifications that build
it.

The decoder uses Transformer Engine's layers if installed, otherwise Megatron's with torch kernels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.engine.options import MegatronOptions, build_transformer_config
from megarl.megatron.layers.activations import GeGLU, SwiGLU
from megarl.megatron.layers.context_parallel import MicroBatchPart
from megarl.megatron.layers.gated_delta_net import delta_net_spec
from megarl.megatron.layers.images import AVERAGED, VISION, DeepstackLayer, trained_features
from megarl.megatron.layers.kernels import check_fusions, packed_attention, uses_transformer_engine
from megarl.megatron.layers.mla import latent_attention_spec
from megarl.megatron.layers.moe import expert_layer_spec, mark_experts
from megarl.megatron.layers.torch_layers import (
    NormedResidual,
    PackedAttention,
    PackedSequences,
    RMSNorm,
    RMSNormOverKeys,
    RMSNormOverQueries,
    SharedPrefixAttention,
    ValueHead,
    rotation_table,
)
from megarl.megatron.runtime.process_groups import Runtime
from megarl.megatron.runtime.versions import submodules_of
from megarl.models import ModelConfig, WeightMap
from megarl.models.delta_rule import ChunkPlan
from megarl.models.rope import attention_factor, inverse_frequencies, position_rows, window_frequencies
from megarl.models.vision_tower import ImageRows, build_tower

_LONGEST_MULTIPLE = 128
"""The longest sequence is rounded up to it: kernels and rotary tables are then chosen for few different lengths."""


class PackedModel(GPTModel):
    """A GPT model over packed micro-batches; the output layer computes only the outputs of response tokens.

    Attributes:
        takes_images: whether the embedding or a layer uses features of images.
        vision_tower: the trained vision tower; None if it is frozen, without images, and after the first stage.
    """

    takes_images: bool
    vision_tower: torch.nn.Module | None

    embedding_scale = 1.0

    def forward(self, part: MicroBatchPart, sequences: PackedSequences, *, hidden_only: bool = False) -> Tensor:
        """Compute the output of this stage.

        Args:
            part: its number of tokens is a multiple of the tensor-parallel size under sequence parallelism.

        Returns:
            Before the last stage hidden states ``[tokens (of this rank), 1, hidden]``. On the last stage, for this
            rank's response tokens: values ``[n]``, or logits ``[n, padded vocabulary / tensor-parallel size]``, or with
            ``hidden_only`` normed hidden states ``[n, hidden]``.
        """
        embedded = None
        if self.vision_tower is not None and part.tower_input is not None:
            sequences.image_rows = trained_features(self.vision_tower, part.tower_input)
        if self.pre_process:
            embedded = self._embed(part.tokens, sequences.image_rows)
        rotary = None
        if sequences.rotation is None:
            rotary = self.rotary_pos_emb(sequences.max_seqlen_q, packed_seq=True)
        hidden = self.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=sequences
        )
        return self._output(hidden, part.read_at, hidden_only) if self.post_process else hidden

    def _embed(self, tokens: Tensor, image_rows: ImageRows | None) -> Tensor:
        """Embeddings of the tokens that this rank holds, and features of its tokens of images."""
        tokens = tokens if image_rows is None else tokens.clamp(min=0)
        embedded: Tensor = self.embedding(input_ids=tokens[None], position_ids=None)
        if self.embedding_scale != 1.0:
            embedded = embedded * self.embedding_scale
        if image_rows is None:
            return embedded
        at, features = image_rows
        return embedded.index_copy(0, at, features[0][:, None].to(embedded.dtype))

    def output_weight(self) -> Tensor | None:
        """Copy this rank's part of the output layer, ``[padded vocabulary / tp, hidden]``; None without one."""
        if not self.post_process or isinstance(self.output_layer, ValueHead):
            return None
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight.detach().clone()

    def _output(self, hidden: Tensor, read_at: Tensor, hidden_only: bool) -> Tensor:
        is_value = isinstance(self.output_layer, ValueHead)
        if self.config.sequence_parallel:
            # Each rank's logits give a part of the gradient (to be summed); values give all of it on every rank.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not is_value, group=self.pg_collection.tp
            )
        predictors = hidden[:, 0].index_select(0, read_at)
        if hidden_only:
            return predictors
        if is_value:
            values: Tensor = self.output_layer(predictors)
            return values
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(predictors, weight=tied)[0]
        return logits


@dataclass(frozen=True)
class StageModel:
    """The model chunks of a pipeline stage, and the conversion of a micro-batch for their layers.

    Attributes:
        chunks: in order; more than one only for an interleaved schedule.
        rotation_factor: factor on the dimensions rotated by ``frequencies``.
        window_frequencies: of layers with sliding-window attention, on the device; None = the same.
        conv_width: convolution width of gated delta net layers; 0 without such layers.
        position_rows: position that rotates each pair of dimensions, on the device; None for models of text only.
    """

    chunks: tuple[PackedModel, ...]
    frequencies: Tensor
    rotation_factor: float = 1.0
    window_frequencies: Tensor | None = None
    conv_width: int = 0
    position_rows: Tensor | None = None

    def sequences(self, part: MicroBatchPart) -> PackedSequences:
        """Return sequence boundaries and rotations of ``part``, computed once for all layers.

        Lengths are those of whole sequences, from which Transformer Engine derives this rank's chunks of each. Padding
        is not declared: that would disable its flash attention, and causality hides padding anyway.
        """
        ranks = self.chunks[0].config.context_parallel_size
        divided, ends = ranks > 1, part.ends
        unit = math.lcm(_LONGEST_MULTIPLE, 2 * ranks)
        longest = -(-max(part.lengths) // unit) * unit
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends if divided else None,
            cu_seqlens_kv_padded=ends if divided else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            runs=part.runs(),
            # Megatron rotates sequence by sequence, which requires whole sequences.
            rotation=None
            if self.chunks[0].position_embedding_type == "rope" and part.shared is None
            else rotation_table(part.positions, self.frequencies, self.rotation_factor, self.position_rows),
            window_rotation=None
            if self.window_frequencies is None
            else rotation_table(part.positions, self.window_frequencies),
            sharers=self.chunks[0].pg_collection.cp if divided else None,
            shared=part.shared,
            image_rows=part.image_rows,
            chunks=ChunkPlan.of(part.lengths, self.conv_width, ends.device) if self.conv_width else None,
        )


def build_model(model: ModelConfig, runtime: Runtime, options: MegatronOptions) -> StageModel:
    """Build this rank's stage, with allocated but unset weights."""
    layout = runtime.layout
    fused = uses_transformer_engine(runtime.device, options.dtype)
    config = build_transformer_config(model, layout, options, fused=fused)
    check_fusions(config, runtime.device)
    if runtime.device.type == "cuda":
        packed_attention()
    frequencies = inverse_frequencies(model).to(runtime.device)
    chunks = tuple(_build_chunk(model, runtime, options, config, chunk, fused) for chunk in range(layout.vpp))
    if _megatron_rotates(model, fused):
        for module in chunks:
            module.rotary_pos_emb.inv_freq = frequencies
    by_window = window_frequencies(model)
    width = 0 if model.linear is None else model.linear.conv_width
    in_window = None if by_window is None else by_window.to(runtime.device)
    rows = position_rows(model)
    rows = None if rows is None else rows.to(runtime.device)
    return StageModel(chunks, frequencies, attention_factor(model), in_window, width, rows)


def _megatron_rotates(model: ModelConfig, fused: bool) -> bool:
    """Whether Megatron rotates queries and keys, before Transformer Engine's attention; its kernel has no factor."""
    plain = model.latent is None and model.window is None and not model.sinks and model.vision is None
    return fused and plain and attention_factor(model) == 1.0


def _build_chunk(
    model: ModelConfig, runtime: Runtime, options: MegatronOptions, config: TransformerConfig, chunk: int, fused: bool
) -> PackedModel:
    layout = runtime.layout
    layers = layout.layers(model.num_layers, runtime.coordinate.pp, chunk)
    number = chunk if layout.vpp > 1 else None  # Megatron's mark of an interleaved schedule
    is_last = runtime.is_last_stage and chunk == layout.vpp - 1
    scale = torch.tensor(model.embedding_scale, dtype=options.dtype).item()
    module = PackedModel(
        config,
        transformer_layer_spec=decoder_spec(model, config, layers, fused=fused, adapted=options.lora is not None),
        vocab_size=WeightMap(model).padded_vocab(layout.tp),
        max_sequence_length=model.max_position_embeddings,
        pre_process=runtime.coordinate.pp == chunk == 0,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings and not options.value_head,
        # The torch layers take their rotation from the micro-batch, once, instead of sequence by sequence.
        position_embedding_type="rope" if _megatron_rotates(model, fused) else "none",
        rotary_base=int(model.rope_theta),
        vp_stage=number,
    )
    module.embedding_scale = scale
    deepstack = 0 if model.vision is None else model.vision.deepstack
    module.takes_images = model.vision is not None and (
        module.pre_process or min(layers, default=deepstack) < deepstack
    )
    module.vision_tower = _trained_tower(model, runtime, options, config) if module.pre_process else None
    if is_last:
        if options.value_head:
            module.output_layer = ValueHead(config, runtime.device, bias=model.has_head_bias)
        else:
            # PackedModel has already gathered the output layer's inputs over the sequence.
            output_layer, parallel = module.output_layer, config.tensor_model_parallel_size > 1
            output_layer.sequence_parallel, output_layer.disable_grad_reduce = False, True
            output_layer.allreduce_dgrad = parallel and not config.sequence_parallel
    mark_experts(module, layout)
    module.to(runtime.device)  # Megatron allocates a shared expert's gate on the host
    return module


def _trained_tower(
    model: ModelConfig, runtime: Runtime, options: MegatronOptions, config: TransformerConfig
) -> torch.nn.Module | None:
    """The vision tower on each rank of the first stage, if it is trained."""
    if model.vision is None or not model.trains_tower:
        return None
    tower = build_tower(model.vision, runtime.device, options.dtype).train()
    if options.recompute is not None and options.recompute.granularity == "full":
        transformers_model: Any = tower
        transformers_model._input_embed_layer = "patch_embed"  # only a warning about adapters needs it
        transformers_model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in tower.parameters():
        # Under sequence parallelism each rank has the gradients of its tokens' features. Otherwise the ranks' gradients
        # are equal up to the order of sums on the device, and the average keeps their weights equal.
        setattr(parameter, "sequence_parallel" if config.sequence_parallel else AVERAGED, True)
        setattr(parameter, VISION, True)
    return tower


def decoder_spec(
    model: ModelConfig, config: TransformerConfig, layers: Iterable[int], *, fused: bool, adapted: bool = False
) -> TransformerBlockSubmodules:
    """Build the specification of one chunk of the decoder, for ``GPTModel``.

    Args:
        adapted: linear layers get adapters, which read their inputs: no norm is part of a linear layer, and the experts
            of a rank are separate layers.
    """
    kinds = [(model.has_experts(n), model.has_window(n), model.is_linear(n)) for n in layers]
    specs = {kind: _layer(model, config, *kind, fused=fused, adapted=adapted) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=_norm(fused))


def _norm(fused: bool) -> Any:
    return importlib.import_module("megatron.core.extensions.transformer_engine").TENorm if fused else RMSNorm


def _layer(
    model: ModelConfig,
    config: TransformerConfig,
    has_experts: bool,
    has_window: bool,
    is_linear: bool,
    *,
    fused: bool,
    adapted: bool,
) -> ModuleSpec:
    layer = _fused_layer(model, has_experts) if fused else _torch_layer(model)
    if has_experts:
        assert model.experts is not None
        layer.submodules.mlp = expert_layer_spec(model.experts, fused=fused, grouped=fused and not adapted)
    if fused and (adapted or not model.input_norms):
        _separate_norms(model, layer, has_experts)
    _place_norms(model, config, layer, fused)
    if model.window is not None or model.sinks:  # torch's attention, also among Transformer Engine's other layers
        size = model.window.size if model.window is not None and has_window else None
        attention = partial(PackedAttention, window=size, sinks=model.sinks)
        layer.submodules.self_attention.submodules.core_attention = attention
    if is_linear:
        _replace_attention(model, layer, fused)
    if model.vision is not None and model.vision.deepstack:
        layer.module = DeepstackLayer
    return layer


def _replace_attention(model: ModelConfig, layer: ModuleSpec, fused: bool) -> None:
    attention, column = layer.submodules.self_attention.submodules, None
    if fused:
        engine = importlib.import_module("megatron.core.extensions.transformer_engine")
        layer.submodules.input_layernorm, column = engine.TENorm, engine.TEColumnParallelLinear
    layer.submodules.self_attention = delta_net_spec(model, column or attention.linear_qkv, attention.linear_proj)


def _place_norms(model: ModelConfig, config: TransformerConfig, layer: ModuleSpec, fused: bool) -> None:
    """Remove norms on inputs, add norms on outputs, and select norms over all heads, as the model has them."""
    parts = layer.submodules
    if not model.input_norms:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if model.output_norms:
        norm = partial(_norm(fused), config=config, hidden_size=model.hidden_size, eps=model.rms_norm_eps)
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=NormedResidual, params={"norm": norm})
    if model.qk_norm_over_heads:
        attention = parts.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = RMSNormOverQueries, RMSNormOverKeys


def _separate_norms(model: ModelConfig, layer: ModuleSpec, has_experts: bool) -> None:
    """Replace Transformer Engine's linear layers that contain a norm by a norm and a linear layer."""
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    if model.latent is None:
        layer.submodules.input_layernorm = engine.TENorm
        layer.submodules.self_attention.submodules.linear_qkv = engine.TEColumnParallelLinear
    if not has_experts:
        layer.submodules.pre_mlp_layernorm = engine.TENorm
        submodules_of(layer.submodules.mlp).linear_fc1 = engine.TEColumnParallelLinear


def _torch_layer(model: ModelConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    submodules_of(layer.submodules.mlp).activation_func = SwiGLU if model.activation == "silu" else GeGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if model.latent is not None:
        layer.submodules.self_attention = latent_attention_spec(
            model, layer.submodules.self_attention, attention.linear_qkv
        )
    return layer


def _fused_layer(model: ModelConfig, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=model.qk_norm,
        num_experts=model.experts.count if has_experts and model.experts is not None else None,
        moe_grouped_gemm=has_experts,
    )
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = partial(SharedPrefixAttention, kernel=engine.TEDotProductAttention)
    if model.latent is not None:
        layer.submodules.input_layernorm = engine.TENorm
        layer.submodules.self_attention = latent_attention_spec(
            model, layer.submodules.self_attention, engine.TEColumnParallelLinear
        )
    return layer
