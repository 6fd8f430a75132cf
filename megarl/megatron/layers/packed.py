"""Packed micro-batches: sequences laid end to end, with the positions of the response tokens.

A response token is predicted at the position before it; its representation is at its position. A micro-batch knows
these positions: outputs come back as one flat tensor over response tokens, row after row, and split by
``response_lengths``. For models that score sequences, each row has one output, at its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import DataError


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device``; to a GPU through pinned memory, without waiting.

    The copy is in the order of the current stream. A copy from ordinary memory would first wait for all earlier work.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def begin_copy_to_host(tensor: Tensor) -> Tensor:
    """Start the copy of a GPU tensor to pinned memory, complete once the stream is synchronized; no-op on a CPU."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


WORTH_SHARING = 1 / 32
"""Least share of its tokens that a micro-batch of different prompts must save: attention copies whole sequences."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Mapping between stored tokens and whole sequences, if sequences store their common beginnings once.

    A causal model gives tokens with equal tokens before them equal hidden states, whatever follows. So the stored
    tokens are the nodes of a prefix tree.

    Attributes:
        spread: ``[tokens of whole sequences]`` int64, index of each among the stored tokens.
        kept: ``[stored tokens]`` int64, index of each among the whole sequences: in the first that has it.
    """

    spread: Tensor
    kept: Tensor

    @classmethod
    def of(cls, tokens: Tensor, lengths: Sequence[int], routes: Tensor | None = None) -> SharedPrefixes:
        """Find the common beginnings of sequences.

        In lexicographic order, a sequence has its longest common beginning with its predecessor.

        Args:
            tokens: ``[tokens]`` int64, the sequences end to end, with ``lengths``.
            routes: ``[tokens, ...]`` experts to replay. Tokens with different experts have different hidden states.
        """
        values = tokens.numpy()[:, None].view(np.uint8)
        if routes is not None:
            values = np.concatenate([values, routes.numpy().reshape(len(tokens), -1).view(np.uint8)], axis=1)
        starts = [*accumulate(lengths, initial=0)]
        keys = [values[start:stop].tobytes() for start, stop in pairwise(starts)]
        indices = np.arange(len(tokens))
        source = indices.copy()
        for before, row in pairwise(sorted(range(len(keys)), key=keys.__getitem__)):
            common = _common_bytes(keys[before], keys[row]) // values.shape[1]
            source[starts[row] : starts[row] + common] = source[starts[before] : starts[before] + common]
        first = indices.copy()
        first[source[::-1]] = indices[::-1]  # the last value of an index counts
        source = first[source]
        is_stored = source == indices
        spread = (is_stored.cumsum() - 1)[source]
        return cls(torch.from_numpy(spread), torch.from_numpy(np.flatnonzero(is_stored)))

    def to(self, device: torch.device) -> SharedPrefixes:
        """Copy the tensors to ``device``."""
        return SharedPrefixes(copy_to(self.spread, device), copy_to(self.kept, device))


def _common_bytes(first: bytes, second: bytes) -> int:
    shorter = min(len(first), len(second))
    differ = np.frombuffer(first, np.uint8, shorter) != np.frombuffer(second, np.uint8, shorter)
    return int(differ.argmax()) if differ.any() else shorter


@dataclass(frozen=True)
class PackedMicroBatch:
    """Some rows of a batch without padding.

    Sequences are stored in order of length, so that sequences of equal length are neighbours (the CPU's attention
    computes each such run in one call). ``response_lengths``, outputs and ``columns`` are in row order.

    Attributes:
        tokens: ``[tokens]`` int64, prompts and responses; common beginnings once. Tokens of images are negative
            (:mod:`megarl.base.image_tokens`).
        lengths: tokens of each whole sequence, in stored order.
        read_at: ``[response tokens]`` int64, index in ``tokens`` of each response token's output: of the token before
            it, which predicts it, or of the token itself. For rows with one output ``[rows]``, of the last tokens.
        targets: ``[response tokens]`` int64, the response tokens, 0 for those of images; for rows with one output
            ``[rows]``, the last tokens.
        response_lengths: response tokens of each row; 1 for rows with one output.
        row_lengths: ``[rows]`` int64, the same numbers as a tensor on the device of the others.
        columns: further inputs of the loss: ``[response tokens, ...]`` tensors by name.
        shared: mapping between ``tokens`` and whole sequences; None if ``tokens`` has whole sequences end to end.
        order: row of each whole sequence, in stored order.
        routes: ``[tokens, expert layers, experts per token]`` in host memory, to replay; None = the routers choose.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    read_at: Tensor
    targets: Tensor
    response_lengths: tuple[int, ...]
    row_lengths: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    shared: SharedPrefixes | None = None
    order: tuple[int, ...] = ()
    routes: Tensor | None = None

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[tuple[Tensor, Tensor]],
        columns: Mapping[str, Tensor] | None = None,
        *,
        share_prompts: bool = False,
        at_tokens: bool = False,
        at_end: bool = False,
        routes: Sequence[Tensor] | None = None,
    ) -> PackedMicroBatch:
        """Pack rows.

        Args:
            rows: prompt and response token ids of each row, 1-D; a response may be empty, a prompt may not.
            columns: tensors over the response tokens, one row after the other.
            share_prompts: store a prompt of several rows once, and every longer beginning that rows have in common, up
                to a whole row: only attention distinguishes the rows. Different prompts share if it saves enough.
            at_tokens: read outputs at the response tokens instead of one position before them.
            at_end: one output per row, at its last token, in place of those of the response tokens.
            routes: each row's experts, prompt and response, ``[tokens, expert layers, experts per token]``.

        Raises:
            DataError: there is no row, a prompt is empty, or a column's length differs from the number of outputs.
        """
        if not rows:
            raise DataError("a micro-batch needs at least one row", code="batch.no-rows")
        prompt_lengths = [len(prompt) for prompt, _ in rows]
        response_lengths = tuple(len(response) for _, response in rows)
        if 0 in prompt_lengths:
            text = f"row {prompt_lengths.index(0)} of a micro-batch has no prompt token to predict from"
            raise DataError(text, code="batch.empty-prompt")
        order = sorted(range(len(rows)), key=lambda row: prompt_lengths[row] + response_lengths[row])
        lengths = tuple(prompt_lengths[row] + response_lengths[row] for row in order)
        starts = dict(zip(order, accumulate(lengths, initial=0), strict=False))
        first = [starts[row] + prompt for row, prompt in enumerate(prompt_lengths)]
        if at_end:
            read_at = torch.tensor([at + length - 1 for at, length in zip(first, response_lengths, strict=True)])
        else:
            read_at = ranges(first if at_tokens else [at - 1 for at in first], response_lengths)
        for name, column in (columns or {}).items():
            if len(column) != len(read_at):
                text = f"column '{name}' has {len(column)} entries for {len(read_at)} response tokens"
                raise DataError(text, code="batch.column-length")
        tokens = torch.cat([part for row in order for part in rows[row]]).to(torch.int64)
        stored_routes = None if routes is None else torch.cat([routes[row] for row in order])
        targets = tokens[read_at] if at_end else torch.cat([response for _, response in rows]).to(torch.int64)
        shared = None
        if share_prompts and len(rows) > 1:
            shared = SharedPrefixes.of(tokens, lengths, stored_routes)
            saved = len(tokens) - len(shared.kept)
            # Plans of micro-batches count on prompts that several rows have.
            repeats = len({prompt.numpy().tobytes() for prompt, _ in rows}) < len(rows)
            if not saved or (saved < WORTH_SHARING * len(tokens) and not repeats):
                shared = None
        if shared is not None:
            tokens, read_at = tokens[shared.kept], shared.spread[read_at]
            stored_routes = None if stored_routes is None else stored_routes[shared.kept]
        outputs = (1,) * len(rows) if at_end else response_lengths
        return cls(
            tokens=tokens,
            lengths=lengths,
            read_at=read_at,
            targets=targets.clamp(min=0),
            response_lengths=outputs,
            row_lengths=torch.tensor(outputs, dtype=torch.int64),
            columns=dict(columns or {}),
            shared=shared,
            order=tuple(order),
            routes=stored_routes,
        )

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens, prompts included."""
        return len(self.tokens)

    def per_row(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split ``values [tokens, ...]`` into one tensor per row, over the tokens of prompt and response."""
        whole = values if self.shared is None else values[self.shared.spread]
        parts = dict(zip(self.order, whole.split(self.lengths), strict=True))
        return tuple(parts[row] for row in range(len(parts)))

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split ``values [response tokens, ...]`` into one tensor per row."""
        parts: tuple[Tensor, ...] = values.split(self.response_lengths)
        return parts

    def to(self, device: torch.device) -> PackedMicroBatch:
        """Copy the tensors to ``device``."""
        return replace(
            self,
            tokens=copy_to(self.tokens, device),
            read_at=copy_to(self.read_at, device),
            targets=copy_to(self.targets, device),
            row_lengths=copy_to(self.row_lengths, device),
            columns={name: copy_to(column, device) for name, column in self.columns.items()},
            shared=None if self.shared is None else self.shared.to(device),
        )


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Concatenate ``start, start + 1, ..., start + length - 1`` over all pairs, int64."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    before = torch.tensor(starts, dtype=torch.int64) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + before.repeat_interleave(counts)
