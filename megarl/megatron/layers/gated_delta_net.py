"""Gated delta net layers (https://arxiv.org/abs/2412.06464) over packed sequences.

Megatron-Core 0.16 has such a layer, without packed sequences and only with flash-linear-attention. This one has the
same weights: a projection to queries, keys, values and output gates, one to learning rates and decays, a causal
convolution, and a gated norm before the output projection. Tensor-parallel ranks divide the heads. The state and the
convolution begin anew with every packed sequence.

On a GPU in half precision flash-linear-attention computes the delta rule, and causal-conv1d the convolution, if they
are installed. Otherwise :mod:`megarl.models.delta_rule` computes both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megarl.megatron.layers.kernels import convolution_kernel, delta_rule_kernel
from megarl.megatron.layers.torch_layers import AttentionParts, PackedSequences, recomputes_attention
from megarl.models import ModelConfig
from megarl.models.delta_rule import causal_convolution, chunked_delta_rule, gated_norm, log_decay


def delta_net_spec(model: ModelConfig, column: Any, row: Any) -> ModuleSpec:
    """Build the specification of a gated delta net; ``column`` as in :class:`AttentionParts`."""
    return ModuleSpec(module=GatedDeltaNet, params={"model": model}, submodules=AttentionParts(column, row))


class _Weight(nn.Module):
    """A module that has only a weight, for its name in the checkpoint."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class GatedDeltaNet(nn.Module):
    """Gated delta net of one layer, with Megatron's arguments plus ``model``."""

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
        assert model.linear is not None
        self.config, self.linear, self.eps = config, model.linear, model.rms_norm_eps
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = groups.tp
        ranks, linear = self.tp_group.size(), model.linear
        self.key_heads, self.value_heads = linear.key_heads // ranks, linear.value_heads // ranks
        values = linear.value_heads * linear.value_dim
        projection = partial(submodules.linear, config=config, group=self.tp_group)
        self.in_proj_qkvz = projection(model.hidden_size, linear.mixed_width + values)
        self.in_proj_ba = projection(model.hidden_size, 2 * linear.value_heads)
        self.conv1d = _Weight(_split_parameter(config, linear.mixed_width // ranks, 1, linear.conv_width))
        self.dt_bias = _split_parameter(config, self.value_heads)
        self.A_log = _split_parameter(config, self.value_heads)
        ones = torch.ones(linear.value_dim, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.out_norm = _Weight(nn.Parameter(ones))  # the same for the heads of all ranks
        self.out_proj = projection(values, model.hidden_size, row=True)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """Compute ``[tokens, 1, hidden]``, without bias, from ``hidden [tokens (of this rank), 1, hidden]``."""
        qkvz, ba = self.in_proj_qkvz(hidden)[0][:, 0], self.in_proj_ba(hidden)[0][:, 0]
        mixed = self.linear.mixed_width // self.tp_group.size()
        qkv, gate = qkvz.split([mixed, qkvz.shape[-1] - mixed], dim=-1)
        recompute = recomputes_attention(self, self.config)

        def core(qkv: Tensor, ba: Tensor) -> Tensor:
            return self._core(qkv, ba, packed_seq_params, keep=recompute)

        values = tensor_parallel.checkpoint(core, False, qkv, ba) if recompute else core(qkv, ba)
        # Each rank's heads give a part of the gradient of the norm.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        normed = gated_norm(values, gate.unflatten(-1, (self.value_heads, -1)), weight, self.eps)
        return self.out_proj(normed.flatten(1)[:, None])[0], None

    def _core(self, qkv: Tensor, ba: Tensor, sequences: PackedSequences, keep: bool) -> Tensor:
        """Convolution and delta rule, ``[stored tokens, value heads, value_dim]``; shared beginnings are spread.

        Torch's delta rule has products of all tokens of a chunk. They are kept for the backward, or computed again.
        """
        shared = sequences.shared
        if shared is not None:
            qkv, ba = qkv.index_select(0, shared.spread), ba.index_select(0, shared.spread)
        width, keys = self.linear.key_dim, self.key_heads
        query, key, value = self._convolved(qkv, sequences).split(
            [keys * width, keys * width, self.value_heads * self.linear.value_dim], dim=-1
        )
        b, a = ba.chunk(2, dim=-1)
        g, b = log_decay(a, self.A_log, self.dt_bias), b.sigmoid()
        query, key = query.unflatten(-1, (keys, -1)), key.unflatten(-1, (keys, -1))
        value = value.unflatten(-1, (self.value_heads, -1))
        kernel = delta_rule_kernel(query.device, query.dtype)
        if kernel is not None:
            values = in_rule_kernel(kernel, query, key, value, g, b, sequences.cu_seqlens_q)
        else:
            assert sequences.chunks is not None
            arguments = (query, key, value, g, b, sequences.chunks)
            if keep or not torch.is_grad_enabled():
                values = chunked_delta_rule(*arguments)[0]
            else:
                values = checkpoint(chunked_delta_rule, *arguments, use_reentrant=False, preserve_rng_state=False)[0]
            values = values.to(qkv.dtype)
        return values if shared is None else values.index_select(0, shared.kept)

    def _convolved(self, qkv: Tensor, sequences: PackedSequences) -> Tensor:
        weight = self.conv1d.weight[:, 0]
        kernel = convolution_kernel(qkv.device)
        if kernel is None:
            assert sequences.chunks is not None
            return F.silu(causal_convolution(qkv, weight, sequences.chunks)[0])
        return in_convolution_kernel(kernel, qkv, weight, sequences.cu_seqlens_q)


def in_rule_kernel(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, b: Tensor, ends: Tensor
) -> Tensor:
    """Compute :func:`~megarl.models.delta_rule.chunked_delta_rule` in flash-linear-attention's kernel.

    ``ends [sequences + 1]`` int32 are cumulative sequence lengths, from 0.
    """
    shared = value.shape[1] // key.shape[1]
    # Earlier releases need as many keys as values.
    query, key = (heads.repeat_interleave(shared, dim=1) for heads in (query, key))
    arguments = [part[None].contiguous() for part in (query, key, value, g, b)]
    values: Tensor = kernel(*arguments, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)[0]
    return values[0]


def in_convolution_kernel(kernel: Callable[..., Any], inputs: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute the convolution with ``weight [channels, width]``, and SiLU, of ``inputs [tokens, channels]``."""
    numbers = torch.arange(len(ends) - 1, dtype=torch.int32, device=ends.device)
    of_sequence = numbers.repeat_interleave(ends.diff(), output_size=len(inputs))
    # The kernel takes several sequences only with neighbouring channels in memory.
    channels = inputs.contiguous().t()[None]
    convolved: Tensor = kernel(channels, weight.contiguous(), None, seq_idx=of_sequence[None], activation="silu")
    return convolved[0].t()


def _split_parameter(config: TransformerConfig, *shape: int) -> nn.Parameter:
    """Allocate a parameter whose first dimension tensor-parallel ranks divide."""
    parameter = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
