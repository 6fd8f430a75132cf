"""Causal attention with sinks in torch, in the trainer and in the embedded engine.

A sink is a trained logit of a head in the denominator of its softmax (https://arxiv.org/abs/2309.17453): a key without
value that every token attends to. Scores are computed in chunks of queries, in float32, and again in the backward:
memory grows with the number of tokens, not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_BYTES, _GPU_CHUNK_BYTES = 2**21, 2**28
"""Size of the scores that are computed at a time: on a CPU they fit a cache."""


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
