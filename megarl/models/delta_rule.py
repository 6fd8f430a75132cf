"""The gated delta rule (https://arxiv.org/abs/2412.06464) over packed sequences, in trainer and embedded engine.

A value head's state ``S [key_dim, value_dim]`` begins with zeros. Each token decays it by ``exp(g)``, moves the value
that it holds at the token's key towards the token's value by the learning rate ``b``, and reads it at the query::

    S = exp(g) * S
    S = S + b * k (v - k S)
    o = q S

Whole sequences are computed in chunks: within a chunk the corrections solve a triangular system, and only the states
between chunks are computed one after the other. Chunks of all sequences are computed together. States are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.sequence_cost import CHUNK

_SHORTEST_CHUNK = 16
_NORM_EPS = 1e-6


class ChunkPlan(NamedTuple):
    """Storage of packed sequences for the convolution and for the chunks; computed once for all layers.

    Chunks are stored by their number within the sequence: first chunks of all sequences, the longest sequence first,
    then second chunks, and so on. Indices are int64.

    Attributes:
        size: tokens of a chunk.
        slots: ``[tokens]``, index of each token in the storage of chunks.
        counts: number of sequences that have a first chunk, a second one, and so on.
        order: ``[sequences]``, in storage order.
        after_history: ``[tokens]``, index of each token if every sequence is preceded by its history.
        histories: ``[sequences, width - 1]``, indices of each sequence's history.
        ends: ``[sequences, width - 1]``, indices of each sequence's last inputs, its next history.
    """

    size: int
    slots: Tensor
    counts: tuple[int, ...]
    order: Tensor
    after_history: Tensor
    histories: Tensor
    ends: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> ChunkPlan:
        """Plan sequences of ``lengths`` tokens, at least one each, for a convolution of ``width`` tokens."""
        size = min(CHUNK, max(_SHORTEST_CHUNK, 1 << (max(lengths) - 1).bit_length()))
        tokens = torch.tensor(lengths, dtype=torch.int64)
        chunks = (tokens + size - 1) // size
        order = chunks.argsort(descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        counts = [int((chunks > number).sum()) for number in range(int(chunks.max()))]
        before = torch.tensor([0, *counts]).cumsum(0)
        starts = tokens.cumsum(0) - tokens
        sequence = torch.arange(len(tokens)).repeat_interleave(tokens)
        positions = torch.arange(int(tokens.sum())) - starts[sequence]
        slots = (before[positions // size] + place[sequence]) * size + positions % size
        begins = starts + torch.arange(len(tokens)) * (width - 1)
        taps = torch.arange(width - 1)
        return cls(
            size,
            slots.to(device),
            tuple(counts),
            order.to(device),
            (torch.arange(len(sequence)) + (sequence + 1) * (width - 1)).to(device),
            (begins[:, None] + taps).to(device),
            (begins[:, None] + tokens[:, None] + taps).to(device),
        )


def causal_convolution(
    inputs: Tensor, weight: Tensor, plan: ChunkPlan, history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve each channel over a sequence's preceding tokens; differentiable in inputs and weight.

    Args:
        inputs: ``[tokens, channels]``, packed sequences.
        weight: ``[channels, width]``; the last element multiplies the current token.
        history: ``[sequences, width - 1, channels]``, inputs before each sequence; None = zeros.

    Returns:
        Outputs ``[tokens, channels]``, and the next history.
    """
    width, sequences = weight.shape[1], len(plan.histories)
    held = inputs.new_zeros(len(inputs) + sequences * (width - 1), inputs.shape[1])
    held = held.index_copy(0, plan.after_history, inputs)
    if history is not None:
        held = held.index_copy(0, plan.histories.flatten(), history.flatten(0, 1))
    rows = len(held) - width + 1
    summed = held[:rows] * weight[:, 0]
    for tap in range(1, width):
        summed = summed + held[tap : tap + rows] * weight[:, tap]
    return summed.index_select(0, plan.after_history - (width - 1)), held.detach()[plan.ends]


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Compute the logarithm of each token's decay, ``[tokens, value heads]`` float32, at most 0.

    Args:
        a: ``[tokens, value heads]``, projected.
        a_log: ``[value heads]``, logarithm of the heads' largest rates.
        dt_bias: ``[value heads]``.
    """
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    b: Tensor,
    plan: ChunkPlan,
    state: Tensor | None = None,
    *,
    with_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule over packed sequences in float32; differentiable.

    Args:
        query: ``[tokens, key heads, key_dim]``; normed here, like the keys.
        key: the same.
        value: ``[tokens, value heads, value_dim]``.
        g: ``[tokens, value heads]``, logarithm of the decay.
        b: ``[tokens, value heads]``, learning rate.
        state: ``[sequences, value heads, key_dim, value_dim]``, states before the sequences; None = zeros.

    Returns:
        Outputs ``[tokens, value heads, value_dim]`` float32, and the states or None.
    """
    heads, shared = key.shape[1], value.shape[1] // key.shape[1]
    q, k = _normed(query) * query.shape[-1] ** -0.5, _normed(key)
    q, k = (_in_chunks(part[:, :, None], plan) for part in (q, k))
    v, g, b = (
        _in_chunks(part.float().unflatten(1, (heads, shared)), plan) for part in (value, g[..., None], b[..., None])
    )
    g = g.cumsum(-2)  # from the start of the chunk
    decay = (g - g.transpose(-1, -2)).tril().exp().tril()
    # Within a chunk: corrections of the values, and of the reads of the earlier state.
    system = (k @ k.transpose(-1, -2)) * (b * decay)
    corrected = torch.linalg.solve_triangular(
        system, torch.cat([v * b, k * (b * g.exp())], -1), upper=False, unitriangular=True
    )
    new, reads = corrected.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * decay
    last = g[..., -1:, :]
    parts = (new, reads, within, q * g.exp(), k * (last - g).exp(), last.exp())
    before = None if state is None else state[plan.order].unflatten(1, (heads, shared))
    outputs, final = _scan(parts, plan, before, with_state)
    packed = outputs.movedim(3, 1).flatten(0, 1).index_select(0, plan.slots).flatten(1, 2)
    return packed, None if final is None else torch.empty_like(final).index_copy(0, plan.order, final).flatten(1, 2)


def _scan(
    parts: tuple[Tensor, ...], plan: ChunkPlan, state: Tensor | None, with_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Pass the states from chunk to chunk; return outputs in the shape of the values, and final states or None.

    Args:
        parts: corrected values, reads, products of queries and keys, decayed queries and keys, and decay of a chunk.
        state: ``[sequences, key heads, value heads per key, key_dim, value_dim]``, in storage order.
    """
    outputs, finals = [], []
    steps = zip(*(part.split(plan.counts) for part in parts), strict=True)
    for number, (new, reads, within, query, key, decay) in enumerate(steps):
        if state is not None:
            new = new - reads @ state
        output = within @ new
        if state is not None:
            output = output + query @ state
        outputs.append(output)
        # Sequences that end here are the last ones.
        going = plan.counts[number + 1] if number + 1 < len(plan.counts) else 0
        needed = len(new) if with_state else going
        added = key[:needed].transpose(-1, -2) @ new[:needed]
        state = added if state is None else state[:needed] * decay[:needed] + added
        finals.append(state[going:])
        state = state[:going]
    return torch.cat(outputs), torch.cat(finals[::-1]) if with_state else None


def delta_rule_step(query: Tensor, key: Tensor, value: Tensor, g: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Compute the gated delta rule for one token of each sequence, and update the states in place.

    The shapes are those of :func:`chunked_delta_rule`, with sequences for tokens; ``state`` is float32 and contiguous.
    Returns ``[sequences, value heads, value_dim]`` float32.
    """
    shared = value.shape[1] // key.shape[1]
    q, k = _normed(query) * query.shape[-1] ** -0.5, _normed(key)
    q, k = (part.repeat_interleave(shared, 1).flatten(0, 1)[:, None] for part in (q, k))
    flat = state.view(-1, *state.shape[2:])
    flat *= g.float().exp().view(-1, 1, 1)
    change = (value.float().flatten(0, 1)[:, None] - k @ flat) * b.float().view(-1, 1, 1)
    flat.baddbmm_(k.transpose(1, 2), change)
    return (q @ flat).view(value.shape)


def gated_norm(values: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``values / rms(values) * weight * silu(gate)`` over the last dimension, in the dtype of the gate.

    Computes in float32, and rounds where transformers does.
    """
    exact = values.to(gate.dtype).float()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(gate.dtype)).mul(F.silu(gate.float())).to(gate.dtype)


def _normed(heads: Tensor) -> Tensor:
    """``heads`` in float32 with Euclidean norms of 1."""
    exact = heads.float()
    return exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + _NORM_EPS)


def _in_chunks(values: Tensor, plan: ChunkPlan) -> Tensor:
    """``[chunks, key heads, value heads per key or 1, size, width]`` of ``[tokens, ...]``, zero after each sequence."""
    stored = values.new_zeros(sum(plan.counts) * plan.size, *values.shape[1:])
    chunks: Tensor = stored.index_copy(0, plan.slots, values).unflatten(0, (-1, plan.size))
    return chunks.movedim(1, 3)
