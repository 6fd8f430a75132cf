"""Multi-head latent attention (https://arxiv.org/abs/2405.04434) over packed sequences.

Queries, keys and values are computed from narrow latents. Every tensor-parallel rank holds the projections onto the
latents; those from the latents to the heads are split by head. Megatron's module splits the former with Megatron's
layers and replicates them with Transformer Engine's; this module has the same weights in both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.megatron.layers.torch_layers import AttentionParts, PackedSequences, RMSNorm, recomputes_attention, rotate
from megarl.models import ModelConfig
from megarl.models.rope import softmax_scale


def latent_attention_spec(model: ModelConfig, attention: ModuleSpec, column: Any) -> ModuleSpec:
    """Build the specification of a layer's latent attention; ``column`` as in :class:`AttentionParts`."""
    parts = AttentionParts(column, attention.submodules.linear_proj, attention.submodules.core_attention)
    return ModuleSpec(module=LatentAttention, params={"model": model}, submodules=parts)


class Projection(nn.Module):
    """A linear map without bias, replicated on every rank, which under sequence parallelism maps its tokens."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark)

    def forward(self, inputs: Tensor) -> Tensor:
        """Project ``[..., inputs]`` to ``[..., outputs]``."""
        return F.linear(inputs, self.weight)


class LatentAttention(nn.Module):
    """Latent attention of one layer, with Megatron's arguments plus ``model``."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: AttentionParts,
        layer_number: int,
        *,
        model: ModelConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert model.latent is not None
        self.config, self.latent, self.head_dim = config, model.latent, model.head_dim
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = groups.tp
        self.heads = model.num_attention_heads // self.tp_group.size()
        self._build_projections(submodules, model)
        self.core_attention = submodules.core_attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=softmax_scale(model),
            k_channels=self.head_dim,
            v_channels=self.latent.v_dim,
            pg_collection=groups,
        )

    def _build_projections(self, submodules: AttentionParts, model: ModelConfig) -> None:
        config, latent, hidden, heads = self.config, self.latent, model.hidden_size, model.num_attention_heads
        linear = partial(submodules.linear, config=config, group=self.tp_group)
        if latent.q_lora_rank:
            self.linear_q_down_proj = Projection(config, hidden, latent.q_lora_rank)
            self.q_layernorm = RMSNorm(config, latent.q_lora_rank, latent.norm_eps)
            self.linear_q_up_proj = linear(latent.q_lora_rank, heads * self.head_dim)
        else:
            self.linear_q_proj = linear(hidden, heads * self.head_dim)
        self.linear_kv_down_proj = Projection(config, hidden, latent.kv_lora_rank + latent.rope_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_lora_rank, latent.norm_eps)
        self.linear_kv_up_proj = linear(latent.kv_lora_rank, heads * (latent.nope_dim + latent.v_dim))
        self.linear_proj = linear(heads * latent.v_dim, hidden, row=True)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """Compute the attention output ``[tokens, 1, hidden]``, without bias.

        Args:
            hidden: ``[tokens (of this rank), 1, hidden]``.
            attention_mask: ignored; the mask is causal within each sequence.
        """
        query, key, value = self._heads(hidden, packed_seq_params)
        # The core attention would rotate whole heads.
        sequences = replace(packed_seq_params, rotation=None)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended: Tensor = self.core_attention(
                query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=sequences
            )
            return attended

        if recomputes_attention(self, self.config):
            attended = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            attended = attend(query, key, value)
        return self.linear_proj(attended.reshape(len(attended), 1, -1))[0], None

    def _heads(self, hidden: Tensor, sequences: PackedSequences) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys ``[tokens, heads of this rank, head_dim]``, and values."""
        latent = self.latent
        if latent.q_lora_rank:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))[0]
        else:
            query = self.linear_q_proj(hidden)[0]
        compressed, shared = self.linear_kv_down_proj(hidden).split([latent.kv_lora_rank, latent.rope_dim], dim=-1)
        unpacked = self.linear_kv_up_proj(self.kv_layernorm(compressed))[0]
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:
            # Each rank's heads give a part of the gradient of the shared key.
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        query = query.view(-1, self.heads, self.head_dim)
        q_plain, q_rotated = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        k_plain, value = unpacked.view(-1, self.heads, latent.nope_dim + latent.v_dim).split(
            [latent.nope_dim, latent.v_dim], dim=-1
        )
        q_rotated, shared = (self._rotated(heads, sequences) for heads in (q_rotated, shared))
        query = torch.cat([q_plain, q_rotated], dim=-1)
        key = torch.cat([k_plain, shared.expand(-1, self.heads, -1)], dim=-1)
        return query, key, value.contiguous()

    def _rotated(self, heads: Tensor, sequences: PackedSequences) -> Tensor:
        """``[tokens, heads, rope_dim]`` rotated; interleaved pairs are first reordered to halves, in q and in k."""
        assert sequences.rotation is not None
        if self.latent.interleaved:
            heads = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(heads, *sequences.rotation)
