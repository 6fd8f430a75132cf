"""Context parallelism: division of packed sequences over ranks, causal attention over all ranks' tokens, gathered
outputs.

Under a causal mask the end of a sequence costs more than its beginning. Each sequence is therefore cut into two chunks
per rank, and rank ``r`` of ``n`` computes chunks ``r`` and ``2n - 1 - r`` (zig-zag): every rank has the same number of
tokens and the same attention. Transformer Engine expects this order too. Sequences are padded at their end to a
multiple of ``2n``; causality hides the padding from every real token.

Gradients of parameters are summed over these ranks, like over data-parallel ones. Each rank computes the whole loss
from the gathered outputs, and its backward follows only its outputs, so that every token counts once.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.base.errors import DataError
from megarl.base.image_tokens import multimodal_positions
from megarl.megatron.layers.kernels import (
    fits_packed_attention,
    flash_prefix_attention,
    window_attention,
)
from megarl.megatron.layers.packed import PackedMicroBatch, SharedPrefixes, copy_to, ranges
from megarl.models.functional import causal_attention, sink_attention
from megarl.models.vision_tower import ImageRows, TowerInput


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Sequence[tuple[int, int]],
    scale: float | None,
    group: dist.ProcessGroup,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of this rank's tokens to all ranks' tokens; communicates, differentiable.

    Keys and values are gathered and put in order. Each of a rank's two chunks of a sequence then attends to the prefix
    of the sequence that ends with it, so that masked products are computed within the chunk only.

    Args:
        query: ``[tokens of this rank, heads, head_dim]``, rotated, in the order of :func:`rank_indices`.
        key: ``[tokens of this rank, key-value heads, head_dim]``, likewise.
        value: like ``key``; its last dimension may differ.
        runs: neighbouring whole sequences with one length: (number of sequences, their length).
        scale: of the scores; None = ``head_dim ** -0.5``.
        window: tokens that a token attends to, itself included; None = all earlier ones.
        sinks: ``[heads]``, see :mod:`megarl.models.functional`; None without sinks.

    Returns:
        ``[tokens of this rank, heads * value's last dimension]``.
    """
    ranks, rank = group.size(), group.rank()
    gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=group)
    gathered = gathered.unflatten(0, (ranks, len(key)))
    outputs, start = [], 0
    for count, length in runs:
        chunk, stop = length // (2 * ranks), start + count * length // ranks
        keys, values = _in_order(gathered[:, start:stop], count).split([key.shape[-1], value.shape[-1]], dim=-1)
        queries = query[start:stop].unflatten(0, (count, 2, chunk))
        halves = [
            attend_to_prefix(
                queries[:, half].transpose(1, 2), keys[:, :, :seen], values[:, :, :seen], scale, window, sinks
            )
            for half, seen in enumerate(((rank + 1) * chunk, (2 * ranks - rank) * chunk))
        ]
        outputs.append(torch.stack(halves, dim=1).flatten(0, 2).flatten(1))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def gather_outputs(outputs: Tensor, part: MicroBatchPart, group: dist.ProcessGroup) -> Tensor:
    """Gather ``[this rank's response tokens, ...]`` to ``[response tokens, ...]``, in row order; communicates.

    The backward gives a rank the gradient of its entries only: all ranks compute the same loss, and no rank may count
    another's tokens.
    """
    if group.size() == 1 or not part.widest:
        return outputs
    result: Tensor = _GatherOutputs.apply(outputs, part, group)
    return result


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, part: MicroBatchPart, group: dist.ProcessGroup) -> Tensor:
        filled = outputs.new_zeros(part.widest, *outputs.shape[1:])
        filled[: len(outputs)] = outputs
        gathered = outputs.new_empty(group.size() * part.widest, *outputs.shape[1:])
        dist.all_gather_into_tensor(gathered, filled, group=group)
        ctx.save_for_backward(part.local_indices)
        return gathered[part.sources]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (local_indices,) = ctx.saved_tensors
        return grads[0][local_indices], None, None


def _in_order(gathered: Tensor, count: int) -> Tensor:
    """``[count, heads, length, width]`` from the tokens of every rank, ``[ranks, count * 2 * chunk, heads, width]``."""
    early, late = gathered.unflatten(1, (count, 2, -1)).unbind(2)
    return torch.cat([early, late.flip(0)]).permute(1, 3, 0, 2, 4).flatten(2, 3)


def attend_to_prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute causal attention of the last tokens of each sequence: ``[count, chunk, heads, width]``.

    ``query [count, heads, chunk, head_dim]`` attends to ``key [count, key-value heads, seen, head_dim]``, whose last
    ``chunk`` tokens are the queries', and ``value [count, key-value heads, seen, width]``.
    """
    chunk, seen = query.shape[2], key.shape[2]
    if sinks is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        attention = flash_prefix_attention if fits_packed_attention(query, value) else sink_attention
        return attention(query, key, value, sinks, scale, window).transpose(1, 2)
    if window is not None and window < seen:
        return window_attention(query, key, value, window, scale).transpose(1, 2)
    mask: Tensor | None = None
    if chunk < seen and query.is_cuda:
        # needs no memory if the flash kernel supports these heads; a lazy import, because it loads torch's compiler
        mask = importlib.import_module("torch.nn.attention.bias").causal_lower_right(chunk, seen)
    elif 1 < chunk < seen:
        mask = torch.ones(chunk, seen, dtype=torch.bool).tril(seen - chunk)
    return causal_attention(query, key, value, mask=mask, scale=scale).transpose(1, 2)


@dataclass(frozen=True)
class MicroBatchPart:
    """One context-parallel rank's part of a micro-batch; all of it if there is one rank.

    Attributes:
        tokens: ``[tokens of this rank]`` int64, padding included.
        positions: ``[tokens of this rank]`` int64, position of each in its whole sequence; ``[3, tokens]`` in time,
            height and width if there are tokens of images.
        lengths: tokens of each whole sequence, padding included, in stored order; ranks have equal shares of each.
        ends: ``[sequences + 1]`` int32, cumulative sums of the lengths, from 0.
        read_at: ``[n]`` int64, index in ``tokens`` of each output to read. A response token belongs to the rank that
            reads its output; ``n`` is the number of this rank's response tokens.
        targets: ``[n]`` int64.
        local_indices: ``[n]`` int64, ascending indices of this rank's response tokens among those of the micro-batch.
        widest: largest number of response tokens of any rank.
        sources: ``[response tokens]`` int64, index of each of the micro-batch's response tokens in all ranks' outputs,
            each rank's padded to ``widest``.
        shared: mapping between stored tokens and whole sequences, if some share their beginning.
        image_rows: indices ``[n]`` int64 of tokens of images, among those that this tensor-parallel rank embeds, and
            their features ``[1 + deepstack, n, hidden]`` (:meth:`megarl.models.vision_tower.ImageFeatures.rows`); None
            without them, and on pipeline stages that do not need them.
        tower_input: input of the trained vision tower in a pass with gradients, in place of ``image_rows``.
    """

    tokens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    ends: Tensor
    read_at: Tensor
    targets: Tensor
    local_indices: Tensor
    widest: int
    sources: Tensor
    shared: SharedPrefixes | None = None
    image_rows: ImageRows | None = None
    tower_input: TowerInput | None = None

    def to(self, device: torch.device) -> MicroBatchPart:
        """Copy the tensors to ``device``."""
        moved: dict[str, Any] = {name: copy_to(t, device) for name, t in vars(self).items() if isinstance(t, Tensor)}
        if self.image_rows is not None:
            at, features = self.image_rows
            moved["image_rows"] = copy_to(at, device), tuple(copy_to(level, device) for level in features)
        if self.tower_input is not None:
            at, patches, grids, rows = self.tower_input
            patches = tuple(copy_to(image, device) for image in patches)
            moved["tower_input"] = TowerInput(copy_to(at, device), patches, grids, copy_to(rows, device))
        return replace(self, **moved, shared=None if self.shared is None else self.shared.to(device))

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return runs of neighbouring whole sequences with one length: (number of sequences, their length)."""
        return tuple((len(list(run)), length) for length, run in groupby(self.lengths))


def context_parallel_part(
    micro_batch: PackedMicroBatch, ranks: int = 1, rank: int = 0, multiple: int = 1
) -> MicroBatchPart:
    """Cut out one context-parallel rank's part of a micro-batch.

    Args:
        multiple: every rank's number of tokens is a multiple of this; required by sequence parallelism.

    Raises:
        DataError: rows share their beginnings, and there are several ranks.
    """
    if micro_batch.shared is not None:
        if ranks > 1:
            text = f"context parallelism over {ranks} ranks cannot divide sequences that share their beginnings"
            raise DataError(text, code="layout.cp-shared-prompts")
        return _with_shared_prefixes(micro_batch, micro_batch.shared, multiple)
    lengths = padded_lengths(micro_batch.lengths, ranks, multiple)
    total = sum(lengths)
    starts = [0, *accumulate(lengths)][: len(micro_batch.lengths)]
    # Indices of the real tokens, and of those at which outputs are read, among the padded sequences.
    padded_indices = ranges(starts, micro_batch.lengths)
    tokens = torch.zeros(total, dtype=torch.int64)
    tokens[padded_indices] = micro_batch.tokens
    held = torch.stack([rank_indices(lengths, ranks, each) for each in range(ranks)])
    slots = torch.empty(total, dtype=torch.int64)
    slots[held.flatten()] = torch.arange(total)
    slots = slots[padded_indices[micro_batch.read_at]]
    share = total // ranks
    owners = slots // share
    local_indices = (owners == rank).nonzero()[:, 0]
    counts = owners.bincount(minlength=ranks)
    widest = int(counts.max())
    sources = torch.empty_like(owners)
    sources[owners.argsort(stable=True)] = ranges([each * widest for each in range(ranks)], counts.tolist())
    return MicroBatchPart(
        tokens=tokens[held[rank]],
        positions=_positions(tokens, lengths)[..., held[rank]],
        lengths=lengths,
        ends=_ends(lengths),
        read_at=slots[local_indices] % share,
        targets=micro_batch.targets[local_indices],
        local_indices=local_indices,
        widest=widest,
        sources=sources,
    )


def _positions(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Positions of whole sequences, laid end to end; ``[3, tokens]`` if there are tokens of images."""
    if tokens.min() >= 0:
        return ranges([0] * len(lengths), lengths)
    sequences = tokens.numpy()
    ends = [*accumulate(lengths)]
    parts = [multimodal_positions(sequences[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)


def part_tokens(micro_batch: PackedMicroBatch, ranks: int = 1, multiple: int = 1) -> int:
    """Count the tokens of each rank's part, for the arguments of :func:`context_parallel_part`."""
    if micro_batch.shared is not None:
        return micro_batch.num_tokens + -micro_batch.num_tokens % multiple
    return sum(padded_lengths(micro_batch.lengths, ranks, multiple)) // ranks


def _with_shared_prefixes(micro_batch: PackedMicroBatch, shared: SharedPrefixes, multiple: int) -> MicroBatchPart:
    """All of a micro-batch, padded to a multiple by an additional last sequence."""
    stored, whole = micro_batch.num_tokens, len(shared.spread)
    missing = -stored % multiple
    lengths = (*micro_batch.lengths, missing) if missing else micro_batch.lengths
    padding = torch.zeros(missing, dtype=torch.int64)
    positions = _positions(torch.cat([micro_batch.tokens[shared.spread], padding]), lengths)
    kept = torch.cat([shared.kept, torch.arange(whole, whole + missing)])
    count = len(micro_batch.targets)
    return MicroBatchPart(
        tokens=torch.cat([micro_batch.tokens, padding]),
        positions=positions[..., kept],
        lengths=lengths,
        ends=_ends(lengths),
        read_at=micro_batch.read_at,
        targets=micro_batch.targets,
        local_indices=torch.arange(count),
        widest=count,
        sources=torch.arange(count),
        shared=SharedPrefixes(torch.cat([shared.spread, torch.arange(stored, stored + missing)]), kept),
    )


def padded_lengths(lengths: Sequence[int], ranks: int, multiple: int = 1) -> tuple[int, ...]:
    """Pad sequence lengths so that they divide over the ranks, each by at most ``2 * ranks - 1``.

    Lengths are unchanged with one rank. An additional last sequence makes each rank's number of tokens a multiple of
    ``multiple``.
    """
    unit = 2 * ranks if ranks > 1 else 1
    padded = tuple(-(-length // unit) * unit for length in lengths)
    missing = -sum(padded) % math.lcm(unit, ranks * multiple)
    return (*padded, missing) if missing else padded


def rank_indices(lengths: Sequence[int], ranks: int, rank: int) -> Tensor:
    """Return the indices of a rank's tokens, in the rank's order: ``[sum of lengths / ranks]`` int64.

    Args:
        lengths: of the sequences; multiples of ``2 * ranks``, unless there is one rank.
    """
    if ranks == 1:
        return torch.arange(sum(lengths))
    starts, chunks = [0, *accumulate(lengths)], [length // (2 * ranks) for length in lengths]
    first = [
        start + piece * chunk
        for start, chunk in zip(starts, chunks, strict=False)
        for piece in (rank, 2 * ranks - 1 - rank)
    ]
    return ranges(first, [chunk for chunk in chunks for _ in range(2)])
