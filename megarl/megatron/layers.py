"""Torch layers that stand where Megatron would use Transformer Engine's, and the value head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.megatron.rotary import rotate


@dataclass
class PackedSequences(PackedSeqParams):
    """What the layers need to know about a packed micro-batch; Transformer Engine reads the inherited fields.

    Attributes:
        runs: neighbouring sequences of equal length: (number of sequences, their length).
        rotation: cosine and sine of each token's rotary embedding, each ``[tokens, 1, head_dim / 2]``.
    """

    runs: tuple[tuple[int, int], ...] = ()
    rotation: tuple[Tensor, Tensor] | None = None


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension, usable under sequence parallelism.

    Each rank then norms its own part of the sequence; the mark on the weight makes Megatron add up its gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark)


class PackedAttention(nn.Module):
    """Causal attention within each of the packed sequences, rotary embedding included.

    Sequences of equal length lie together and are attended to in one call per length, so many short sequences cost
    no more calls than there are different lengths. The arguments of the constructor are Megatron's.
    """

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Attention output ``[tokens, heads * head_dim]``.

        Args:
            query: ``[tokens, heads, head_dim]``, before rotation.
            key: ``[tokens, key-value heads, head_dim]``, before rotation.
            value: as ``key``.
            attention_mask: not read; causality and the sequences' ends are all that is masked.
            packed_seq_params: where the sequences begin.
        """
        assert packed_seq_params.rotation is not None
        query, key = (rotate(heads, *packed_seq_params.rotation) for heads in (query, key))
        outputs, start = [], 0
        for count, length in packed_seq_params.runs:
            stop = start + count * length
            q, k, v = (heads[start:stop].unflatten(0, (count, length)).transpose(1, 2) for heads in (query, key, value))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(attended.transpose(1, 2).reshape(stop - start, -1))
            start = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class ValueHead(nn.Module):
    """One number per token from its hidden state, computed in float32; replicated over tensor-parallel ranks.

    It begins as zeros: the first values are zero in every layout, and advantages are then the returns themselves.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``[n]`` float32 of ``hidden [n, hidden size]``."""
        return F.linear(hidden.float(), self.weight.float())[:, 0]
