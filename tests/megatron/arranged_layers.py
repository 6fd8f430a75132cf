"""Transformer Engine's arrangement of rotation and attention, on a CPU.

Transformer Engine needs a GPU. Here megarl's specification for it has Megatron's linear layers, and an attention that
reads the boundaries of whole sequences as Transformer Engine does; Megatron rotates where it would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from engine_cases import Setup, engine
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from support.distributed import Place
from torch import Tensor, nn

from megarl.megatron import MegatronEngine
from megarl.megatron.engine import model
from megarl.megatron.layers.torch_layers import PackedAttention, SharedPrefixAttention
from megarl.models import ModelConfig


class WholeSequences(nn.Module):
    """Attention over whole sequences with Transformer Engine's arguments; knows neither rotations nor prompts."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None and len(query) == packed_seq_params.cu_seqlens_q[-1]
        ends = packed_seq_params.cu_seqlens_q.tolist()
        parts = []
        for start, stop in pairwise(ends):
            q, k, v = (heads[start:stop].transpose(0, 1)[None] for heads in (query, key, value))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            parts.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


torch_spec = model.decoder_spec


def decoder_spec(
    config: ModelConfig, megatron: TransformerConfig, layers: Iterable[int], *, fused: bool, adapted: bool
) -> TransformerBlockSubmodules:
    """The fused specification's attention among torch's layers."""
    assert fused and not adapted
    spec = torch_spec(config, megatron, layers, fused=False, adapted=False)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if getattr(attention, "core_attention", None) is PackedAttention:
            attention.core_attention = partial(SharedPrefixAttention, kernel=WholeSequences)
    return spec


@contextmanager
def arranged_engine(place: Place, path: Path, setup: Setup) -> Iterator[MegatronEngine]:
    build = model.build_transformer_config
    with (
        mock.patch.object(model, "uses_transformer_engine", return_value=True),
        mock.patch.object(model, "build_transformer_config", lambda *args, fused: build(*args, fused=False)),
        mock.patch.object(model, "decoder_spec", decoder_spec),
        engine(place, path, setup) as built,
    ):
        yield built
