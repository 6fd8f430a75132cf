"""From a model's shape and a layout to Megatron's ``TransformerConfig``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.models import ModelConfig, ParallelLayout


def build_transformer_config(
    model: ModelConfig, layout: ParallelLayout, dtype: torch.dtype, *, sequence_parallel: bool, fused: bool
) -> TransformerConfig:
    """Megatron's configuration of a dense decoder.

    Args:
        model: the model.
        layout: the role's layout; it must fit the model (:func:`megarl.models.check_layout`).
        dtype: of weights and activations.
        sequence_parallel: split activations over tensor-parallel ranks by sequence; without effect at one rank.
        fused: use Transformer Engine's fused kernels.
    """
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        qk_layernorm=model.qk_norm,
        add_qkv_bias=model.qkv_bias,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        # Every micro-batch has its own number of tokens; Megatron asks for this dispatcher then, even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights are always loaded, so they are only allocated. Initialisation itself must stay on: with it Megatron
        # marks which parameters are split, without which their gradients would be left out of the norm.
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        embedding_init_method=_leave_unset,
        # Losses come normalised by global counts, so gradients are summed and never divided.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
        bias_activation_fusion=fused,
        use_te_activation_func=not fused,  # Megatron's name for taking the activation from the layer specification
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,
        cuda_graph_scope=[],
    )


def _leave_unset(weight: Tensor) -> Tensor:
    return weight
