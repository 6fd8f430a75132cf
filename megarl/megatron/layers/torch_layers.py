"""Torch layers: RMSNorm, packed attention, rotary embedding, norms over all heads and on outputs, value head.

The first three replace Transformer Engine's layers. Megatron has none of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.megatron.layers.context_parallel import attend, attend_to_prefix
from megarl.megatron.layers.kernels import (
    PackedFlashKernel,
    fits_packed_attention,
    flash_sink_attention,
    packed_attention,
)
from megarl.megatron.layers.packed import SharedPrefixes
from megarl.models.delta_rule import ChunkPlan
from megarl.models.vision_tower import ImageRows


@dataclass
class PackedSequences(PackedSeqParams):
    """Sequence boundaries and rotations of a packed micro-batch; Transformer Engine reads the inherited fields.

    Attributes:
        runs: neighbouring sequences with one length, padding included: (number of sequences, their length).
        rotation: cosine and sine of each token's rotary embedding, see :func:`rotation_table`, for the tokens of this
            rank; None if Megatron rotates, or has rotated.
        window_rotation: the same for layers with sliding-window attention; None = no difference.
        sharers: context-parallel ranks that divide each sequence zig-zag; None if this rank has whole sequences.
        shared: mapping between stored tokens and whole sequences, if some share their beginning.
        chunks: storage of the sequences in gated delta net layers; None without such layers.
        image_rows: features of the tokens of images, see
            :class:`~megarl.megatron.layers.context_parallel.MicroBatchPart`.
    """

    runs: tuple[tuple[int, int], ...] = ()
    rotation: tuple[Tensor, Tensor] | None = None
    window_rotation: tuple[Tensor, Tensor] | None = None
    sharers: dist.ProcessGroup | None = None
    shared: SharedPrefixes | None = None
    chunks: ChunkPlan | None = None
    image_rows: ImageRows | None = None


@dataclass
class AttentionParts:
    """The layers of attention that differ between Megatron's and Transformer Engine's specifications.

    ``column`` is a column-parallel linear layer without a norm.
    """

    column: Any = None
    row: Any = None
    core_attention: Any = None

    def linear(
        self, inputs: int, outputs: int, config: TransformerConfig, group: dist.ProcessGroup, *, row: bool = False
    ) -> Any:
        """Build a column- or row-parallel linear layer without bias."""
        options: dict[str, Any] = {"gather_output": False, "skip_bias_add": False, "init_method": config.init_method}
        if row:
            init = config.output_layer_init_method
            options = {"input_is_parallel": True, "skip_bias_add": True, "init_method": init}
        kind = self.row if row else self.column
        return build_module(
            kind, inputs, outputs, config=config, bias=False, is_expert=False, tp_group=group, **options
        )


def recomputes_attention(module: nn.Module, config: TransformerConfig) -> bool:
    """Return whether a module computes its attention again in the backward (``recompute_modules=[core_attn]``)."""
    return module.training and config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (https://arxiv.org/abs/1910.07467), computed in float32.

    Under sequence parallelism each rank norms its part of the sequence; the weight's mark makes Megatron sum gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute ``inputs / rms(inputs) * weight`` in their dtype; zero-centered weights are added to 1."""
        result: Tensor = _RMSNorm.apply(inputs, self.weight, self.eps, self.offset)
        return result


class RMSNormOverQueries(nn.Module):
    """Root-mean-square norm over all query heads of a token, which tensor-parallel ranks divide; in float32.

    Ranks sum the squares of their heads, and in the backward their products with the gradient. Every rank has the whole
    weight and uses the part of its heads: Megatron sums the gradients of the norms on queries and keys over the ranks.
    """

    heads_field = "num_attention_heads"

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.group = get_tensor_model_parallel_group()
        width, device = getattr(config, self.heads_field) * hidden_size, torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        """Norm ``inputs [..., heads of this rank, head_dim]``; communicates, in the shape and dtype of the inputs."""
        local = self.weight.chunk(self.group.size())[self.group.rank()].view(inputs.shape[-2:])
        result: Tensor = _RMSNormOverHeads.apply(inputs, local, self.eps, self.group)
        return result


class RMSNormOverKeys(RMSNormOverQueries):
    """The same over all key heads."""

    heads_field = "num_query_groups"


class NormedResidual(nn.Module):
    """Adds the norm of a layer's output to the residual, in place of Megatron's bias, dropout and addition."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function of ``(output, bias)``, residual and dropout that Megatron calls."""
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        assert output[1] is None and dropout == 0.0, "megarl builds layers without output biases and dropout"
        normed: Tensor = self.norm(output[0])
        return residual + normed


class PackedAttention(nn.Module):
    """Causal attention within each packed sequence, rotary embedding included.

    On a GPU, in half precision, one kernel computes all sequences. Otherwise one call computes each run of neighbouring
    sequences of equal length, so the number of calls is that of different lengths. The arguments of the constructor are
    Megatron's, and:

    Args:
        window: tokens that a token attends to, itself included; None = all earlier ones.
        sinks: each head has a sink, see :mod:`megarl.models.functional`.

    Attributes:
        softmax_offset: ``[heads of this rank]``, the sinks under Megatron's name; None without sinks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.window, self.scale = window, softmax_scale
        self.softmax_offset = None
        if sinks:  # a logit per query head of this rank
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            logits = torch.empty(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.softmax_offset = nn.Parameter(logits)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

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
        """Compute the attention output ``[tokens, heads * head_dim]``.

        Args:
            query: ``[tokens, heads, head_dim]``, before rotation.
            key: ``[tokens, key-value heads, head_dim]``, likewise.
            value: like ``key``; its last dimension may differ.
            attention_mask: ignored; the mask is causal within each sequence, and within the window.
        """
        rotation = packed_seq_params.rotation
        if self.window is not None and packed_seq_params.window_rotation is not None:
            rotation = packed_seq_params.window_rotation
        if rotation is not None:
            query, key = (rotate(heads, *rotation) for heads in (query, key))
        if packed_seq_params.sharers is not None:
            runs, sharers = packed_seq_params.runs, packed_seq_params.sharers
            return attend(query, key, value, runs, self.scale, sharers, self.window, self.softmax_offset)
        shared = packed_seq_params.shared
        if shared is None:
            return self._whole(query, key, value, packed_seq_params)
        query, key, value = (heads.index_select(0, shared.spread) for heads in (query, key, value))
        return self._whole(query, key, value, packed_seq_params).index_select(0, shared.kept)

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        """Attention over whole sequences stored end to end."""
        if fits_packed_attention(query, value):
            return self._in_one_kernel(query, key, value, sequences)
        runs = sequences.runs
        # Splitting, unlike slicing, puts all runs' gradients together in one pass.
        parts = zip(*(heads.split([n * length for n, length in runs]) for heads in (query, key, value)), strict=True)
        outputs = []
        for run, part in zip(runs, parts, strict=True):
            q, k, v = (heads.unflatten(0, run).transpose(1, 2) for heads in part)
            attended = attend_to_prefix(q, k, v, self.scale, self.window, self.softmax_offset)
            outputs.append(attended.flatten(2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _in_one_kernel(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        ends, longest = sequences.cu_seqlens_q, sequences.max_seqlen_q
        if self.softmax_offset is not None:
            assert self.scale is not None
            kernel = PackedFlashKernel(ends, ends, (longest, longest), self.scale, self.window)
            return flash_sink_attention(query, key, value, self.softmax_offset, kernel).flatten(1)
        attention = packed_attention()
        assert attention is not None
        earlier = -1 if self.window is None else self.window - 1  # -1 = every earlier token
        attended: Tensor = attention(
            query, key, value, ends, ends, longest, longest, scale=self.scale, window_size=(earlier, 0)
        )
        return attended.flatten(1)


class SharedPrefixAttention(nn.Module):
    """Transformer Engine's attention over packed sequences that may share their beginnings.

    Megatron rotates queries and keys sequence by sequence before it calls the attention. Tokens that are stored once
    for several sequences are rotated here instead, in place of Megatron, and spread to whole sequences.

    Args:
        kernel: class of the attention over whole sequences; takes the further arguments, which are Megatron's.
    """

    def __init__(self, *args: Any, kernel: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.kernel = kernel(*args, **options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: PackedSequences, **options: Any
    ) -> Tensor:
        """Compute the attention output of the stored tokens, in the kernel's shape ``[tokens, ...]``.

        Args:
            query: ``[stored tokens, heads, head_dim]``.
            key: ``[stored tokens, key-value heads, head_dim]``.
            value: like ``key``; its last dimension may differ.
        """
        if packed_seq_params.rotation is not None:
            query, key = (rotate(heads, *packed_seq_params.rotation) for heads in (query, key))
        shared = packed_seq_params.shared
        if shared is not None:
            query, key, value = (heads.index_select(0, shared.spread) for heads in (query, key, value))
        attended: Tensor = self.kernel(query, key, value, *args, packed_seq_params=packed_seq_params, **options)
        return attended if shared is None else attended.index_select(0, shared.kept)


class ValueHead(nn.Module):
    """A scalar per token from its hidden state, computed in float32; replicated over tensor-parallel ranks.

    Initialized with zeros: the first values are zero in every layout, and advantages then equal the returns.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the values ``[n]`` float32 of ``hidden [n, hidden size]``."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)[:, 0]


class _RMSNorm(torch.autograd.Function):
    """Saves memory passes against autograd's version; small models on a CPU are bound by them."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        exact = inputs.float()
        scale = (torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_() / inputs.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(inputs, weight, scale)
        ctx.offset = offset
        normed: Tensor = exact * scale
        if offset:
            return normed.mul_(weight.float() + offset).to(inputs.dtype)
        return normed.to(inputs.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inputs, weight, scale = ctx.saved_tensors
        grad, exact_weight = grads[0].float(), weight.float() + ctx.offset
        normed = inputs.float() * scale
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (along @ exact_weight)[..., None] / inputs.shape[-1]
        grad_inputs = (grad * exact_weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_inputs.to(inputs.dtype), grad_weight, None, None


class _RMSNormOverHeads(torch.autograd.Function):
    """As :class:`_RMSNorm` over the last two dimensions, with sums over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
        exact = inputs.float()
        squares = _summed(exact.square().sum((-2, -1), keepdim=True), group)
        ctx.width, ctx.group = weight.numel() * group.size(), group
        scale = (squares / ctx.width + eps).rsqrt_()
        ctx.save_for_backward(inputs, weight, scale)
        normed: Tensor = (exact * scale).to(inputs.dtype).mul_(weight)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inputs, weight, scale = ctx.saved_tensors
        grad, exact_weight = grads[0].float(), weight.float()
        normed = inputs.float() * scale
        along = grad * normed
        grad_weight = along.flatten(0, -3).sum(0).to(weight.dtype)
        mean = _summed((along * exact_weight).sum((-2, -1), keepdim=True), ctx.group) / ctx.width
        grad_inputs = (grad * exact_weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_inputs.to(inputs.dtype), grad_weight, None, None


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def rotation_table(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0, position_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine ``[tokens, 1, rotary_dim / 2]`` float32 of each token's rotations.

    Rotary position embedding (Su et al., RoFormer, https://arxiv.org/abs/2104.09864), halves rotated as in Llama.

    Args:
        positions: ``[tokens]``, of each token in its sequence; or ``[3, tokens]`` in time, height and width.
        frequencies: ``[rotary_dim / 2]`` float32, radians per position.
        factor: on both, see :func:`megarl.models.rope.attention_factor`.
        position_rows: row of ``positions [3, tokens]`` for each pair (:func:`megarl.models.rope.position_rows`).
    """
    by_pair = positions[:, None] if positions.dim() == 1 else positions[position_rows].t()
    angles = (by_pair.to(torch.float32) * frequencies)[:, None, :]
    cosine, sine = angles.cos(), angles.sin()
    return (cosine, sine) if factor == 1.0 else (cosine * factor, sine * factor)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``heads [tokens, heads, head_dim]`` by :func:`rotation_table`; differentiable in ``heads``.

    Dimensions beyond the width of the table keep their values.
    Computes in float32 and rounds once, like SGLang and Transformer Engine.
    """
    result: Tensor = _Rotate.apply(heads, cosine, sine)
    return result


class _Rotate(torch.autograd.Function):
    """The backward of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(heads, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(grads[0], cosine, -sine), None, None


def _turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    width = 2 * cosine.shape[-1]
    first, second = heads[..., :width].chunk(2, dim=-1)
    result = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    upper, lower = result[..., :width].chunk(2, dim=-1)
    torch.addcmul(first * cosine, second, sine, value=-1, out=upper)
    torch.addcmul(second * cosine, first, sine, out=lower)
    result[..., width:] = heads[..., width:]
    return result
