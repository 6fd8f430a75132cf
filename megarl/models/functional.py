"""Attention, with and without sinks, and expert choice in torch, for the trainer and the embedded engine.

A sink is a trained logit of a head in the denominator of its softmax (https://arxiv.org/abs/2309.17453): a key without
value that every token attends to. Scores are computed in chunks of queries, in float32, and again in the backward:
memory grows with the number of tokens, not with its square. Experts are chosen in float32, as in transformers: a
rounded score selects other experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megarl.models.model_config import Experts

_CHUNK_BYTES, _GPU_CHUNK_BYTES = 2**21, 2**28
"""Size of the scores that are computed at a time: on a CPU they fit a cache."""
GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which torch prefers on Hopper: it prepares a plan for each shape, and batches differ in shape."""


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Compute causal attention with sinks of the last tokens of sequences; differentiable.

    Args:
        query: ``[sequences, heads, tokens, head_dim]``, of the last tokens.
        key: ``[sequences, key-value heads, all tokens, head_dim]``.
        value: like ``key``; its last dimension may differ.
        sinks: ``[heads]``, logits.
        scale: of the scores, not of the sinks.
        window: tokens that a token attends to, itself included; None = all earlier ones.

    Returns:
        ``[sequences, heads, tokens, value's last dimension]``.
    """
    result: Tensor = _SinkAttention.apply(query, key, value, sinks, scale, window)
    return result


def masked_sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, mask: Tensor
) -> Tensor:
    """Compute attention with sinks under a mask, with all scores in memory.

    Args:
        query: ``[sequences, key-value heads, queries of a head, head_dim]``.
        key: ``[sequences, key-value heads, tokens, head_dim]``.
        value: like ``key``.
        sinks: ``[key-value heads, queries of a head]``, logits.
        scale: of the scores, not of the sinks.
        mask: added to the scores, broadcast.

    Returns:
        The shape and dtype of ``query``.
    """
    scores = torch.add(mask, query.float() @ key.float().transpose(-1, -2), alpha=scale)
    total = torch.logaddexp(scores.logsumexp(-1), sinks.float())
    return (torch.exp(scores - total[..., None]) @ value.float()).to(query.dtype)


class _Chunk(NamedTuple):
    """Queries ``[start, stop)``, the keys ``[first, last)`` that any of them attends to, and the hidden pairs."""

    queries: slice
    keys: slice
    hidden: Tensor


def _chunks(query: Tensor, key: Tensor, window: int | None) -> Iterator[_Chunk]:
    sequences, heads, count, _ = query.shape
    seen = key.shape[2]
    nbytes = _GPU_CHUNK_BYTES if query.is_cuda else _CHUNK_BYTES
    rows = max(1, nbytes // (4 * sequences * heads * min(seen, 2 * window if window else seen)))
    rows = rows if window is None else min(rows, window)
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        position = seen - count + start  # of the chunk's first query
        first = 0 if window is None else max(0, position - window + 1)
        visible = torch.ones(stop - start, seen - count + stop - first, dtype=torch.bool, device=query.device)
        visible = visible.tril(position - first)
        if window is not None:
            visible = visible.triu(position - first - window + 1)
        yield _Chunk(slice(start, stop), slice(first, seen - count + stop), ~visible)


class _SinkAttention(torch.autograd.Function):
    """Saves the logarithm of each query's denominator; heads of one key are neighbouring rows of its products."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, window: int | None
    ) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        totals = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        for chunk in _chunks(query, key, window):
            scores = _scores(query, key, chunk, scale)
            total = torch.logaddexp(scores.logsumexp(-1), sinks.float()[:, None])
            totals[:, :, chunk.queries] = total
            shares = torch.exp(scores.sub_(total[..., None]))
            output[:, :, chunk.queries] = _times(shares, value[:, :, chunk.keys])
        ctx.save_for_backward(query, key, value, sinks, output, totals)
        ctx.scale, ctx.window = scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        query, key, value, sinks, output, totals = ctx.saved_tensors
        along = (grads[0].float() * output.float()).sum(-1)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(heads, dtype=torch.float32) for heads in (key, value))
        for chunk in _chunks(query, key, ctx.window):
            grad = grads[0][:, :, chunk.queries].float()
            scores = _scores(query, key, chunk, ctx.scale)
            shares = torch.exp(scores.sub_(totals[:, :, chunk.queries, None]))
            grad_value[:, :, chunk.keys] += _summed_over_heads(shares, grad, key.shape[1])
            grad_shares = _times(grad, value[:, :, chunk.keys].transpose(-1, -2))
            grad_scores = shares.mul_(grad_shares.sub_(along[:, :, chunk.queries, None])).mul_(ctx.scale)
            grad_query[:, :, chunk.queries] = _times(grad_scores, key[:, :, chunk.keys])
            grad_key[:, :, chunk.keys] += _summed_over_heads(
                grad_scores, query[:, :, chunk.queries].float(), key.shape[1]
            )
        grad_sinks = -(torch.exp(sinks.float()[:, None] - totals) * along).sum((0, 2))
        return (
            grad_query,
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks.to(sinks.dtype),
            None,
            None,
        )


def _scores(query: Tensor, key: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    """Scores ``[sequences, heads, queries, keys]`` float32, minus infinity for hidden pairs."""
    scores = _times(query[:, :, chunk.queries].float(), key[:, :, chunk.keys].transpose(-1, -2))
    return scores.mul_(scale).masked_fill_(chunk.hidden, -torch.inf)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Product of ``[sequences, heads, n, k]`` float32 and its key-value head's ``[sequences, kv heads, k, m]``."""
    sequences, heads, count, _ = rows.shape
    grouped = rows.reshape(sequences, matrix.shape[1], -1, rows.shape[-1])
    return (grouped @ matrix.float()).view(sequences, heads, count, -1)


def _summed_over_heads(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """Products ``left.T @ right`` of each head, summed over the heads of a key-value head."""
    left, right = (part.reshape(len(part), groups, -1, part.shape[-1]) for part in (left, right))
    return left.transpose(-1, -2) @ right


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Compute torch's scaled dot-product attention with grouped queries.

    Args:
        query: ``[sequences, heads, tokens, head_dim]``.
        key: ``[sequences, key-value heads, earlier tokens, head_dim]``.
        value: like ``key``; its last dimension may differ.
        mask: added to the scores, or one of ``torch.nn.attention.bias``; None = causal for as many queries as keys,
            else every query attends to every key.
        scale: of the scores; None = ``head_dim ** -0.5``.

    Returns:
        ``[sequences, heads, tokens, value's last dimension]``.
    """
    is_causal = mask is None and query.shape[2] == key.shape[2]
    if query.shape[1] != key.shape[1] and lacks_grouped_kernel(query, value, mask):
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    with sdpa_kernel(GPU_KERNELS) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )


def lacks_grouped_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch computes grouped queries on this GPU only with all scores in memory.

    Flash attention has neither single precision nor masks, and one head width of at most 256; the memory-efficient
    kernel has no grouped queries.
    """
    fits_flash = query.shape[-1] == value.shape[-1] <= 256
    return query.is_cuda and (query.dtype is torch.float32 or type(mask) is Tensor or not fits_flash)


def score_experts(logits: Tensor, experts: Experts) -> Tensor:
    """Compute the score of each expert, ``[tokens, experts]`` float32, from the router's logits."""
    return logits.softmax(-1) if experts.score == "softmax" else logits.sigmoid()


def choose_experts(scores: Tensor, experts: Experts, correction: Tensor | None = None) -> Tensor:
    """Select the experts of each token: ``[tokens, per token]`` indices.

    Args:
        scores: ``[tokens, experts]`` float32.
        correction: ``[experts]``, added to the scores for the selection only.
    """
    with torch.no_grad():
        ranking = scores if correction is None else scores + correction
        if experts.groups_per_token < experts.groups:
            grouped = ranking.unflatten(-1, (experts.groups, -1))
            group_scores = grouped.topk(experts.group_best, dim=-1).values.sum(-1)
            best = group_scores.topk(experts.groups_per_token, dim=-1).indices
            excluded = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter(1, best, False)
            ranking = grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)
        return ranking.topk(experts.per_token, dim=-1).indices


def weigh_experts(scores: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Compute the weights of the selected experts, ``[tokens, per token]``, differentiable in the scores."""
    weights = scores.gather(1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * experts.scaling
