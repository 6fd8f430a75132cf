"""Packed micro-batches: sequences laid end to end, with the positions of the response tokens.

A response token is predicted at the position before it; its representation is at its position. A micro-batch knows
these positions: outputs come back as one flat tensor over response tokens, row after row, and split by
``response_lengths``. For models that score sequences, each row has one output, at its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

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


@dataclass(frozen=True)
class SharedPrompts:
    """Mapping between stored tokens and whole sequences, if a prompt of several sequences is stored once.

    Attributes:
        spread: ``[tokens of whole sequences]`` int64, index of each among the stored tokens.
        kept: ``[stored tokens]`` int64, index of each among the whole sequences (one of them if shared).
    """

    spread: Tensor
    kept: Tensor

    def to(self, device: torch.device) -> SharedPrompts:
        """Copy the tensors to ``device``."""
        return SharedPrompts(copy_to(self.spread, device), copy_to(self.kept, device))


@dataclass(frozen=True)
class PackedMicroBatch:
    """Some rows of a batch without padding.

    Sequences are stored in order of length, so that sequences of equal length are neighbours (the CPU's attention
    computes each such run in one call). ``response_lengths``, outputs and ``columns`` are in row order.

    Attributes:
        tokens: ``[tokens]`` int64, prompts and responses; a shared prompt once. Tokens of images are negative
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
    shared: SharedPrompts | None = None
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
            share_prompts: store a prompt of several rows once: only attention distinguishes the rows.
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
        store = _Store.of([prompt for prompt, _ in rows], response_lengths, share_prompts)
        at_responses = ranges(store.response_at, store.responses) if at_tokens else store.predictors()
        read_at = store.ends() if at_end else at_responses
        for name, column in (columns or {}).items():
            if len(column) != len(read_at):
                text = f"column '{name}' has {len(column)} entries for {len(read_at)} response tokens"
                raise DataError(text, code="batch.column-length")
        tokens = store.stored(rows).to(torch.int64)
        stored_routes = None
        if routes is not None:
            stored_routes = store.stored(
                [each.tensor_split([n]) for each, n in zip(routes, prompt_lengths, strict=True)]
            )
        outputs = (1,) * len(rows) if at_end else response_lengths
        targets = tokens[read_at] if at_end else torch.cat([response for _, response in rows]).to(torch.int64)
        return cls(
            tokens=tokens,
            lengths=tuple(store.length(row) for row in store.order),
            read_at=read_at,
            targets=targets.clamp(min=0),
            response_lengths=outputs,
            row_lengths=torch.tensor(outputs, dtype=torch.int64),
            columns=dict(columns or {}),
            shared=store.shared() if len(store.families) < len(rows) else None,
            order=tuple(store.order),
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


@dataclass(frozen=True)
class _Store:
    """Storage positions of each row's parts: group after group, a group's prompt before its responses.

    Attributes:
        order: rows by the length of their sequence, the order of whole sequences.
        families: rows with one prompt, in the order of their first.
        prompt_at: index of each row's first prompt token.
        response_at: index of each row's first response token.
    """

    prompts: Sequence[int]
    responses: Sequence[int]
    order: Sequence[int]
    families: Sequence[Sequence[int]]
    prompt_at: Sequence[int]
    response_at: Sequence[int]

    @classmethod
    def of(cls, prompts: Sequence[Tensor], responses: Sequence[int], share: bool) -> _Store:
        """Assign positions to rows; each row is a separate family unless they ``share`` prompts."""
        lengths = [len(prompt) for prompt in prompts]
        order = sorted(range(len(lengths)), key=lambda row: lengths[row] + responses[row])
        families: dict[bytes | int, list[int]] = {}
        for row in order:
            families.setdefault(prompts[row].numpy().tobytes() if share else row, []).append(row)
        prompt_at, response_at, offset = [0] * len(lengths), [0] * len(lengths), 0
        for family in families.values():
            begin = offset
            offset += lengths[family[0]]
            for row in family:
                prompt_at[row], response_at[row] = begin, offset
                offset += responses[row]
        return cls(lengths, responses, order, list(families.values()), prompt_at, response_at)

    def stored(self, halves: Sequence[Sequence[Tensor]]) -> Tensor:
        """Concatenate values of each row's prompt and response tokens in the order of storage."""
        return torch.cat(
            [part for rows in self.families for part in (halves[rows[0]][0], *(halves[r][1] for r in rows))]
        )

    def length(self, row: int) -> int:
        """Tokens of a whole sequence."""
        return self.prompts[row] + self.responses[row]

    def predictors(self) -> Tensor:
        """For each response token, row after row, the index of the token that predicts it.

        The last token of a prompt predicts the first of a response, which may be stored elsewhere.
        """
        starts, lengths = [], []
        for prompt, response, prompt_at, response_at in zip(
            self.prompts, self.responses, self.prompt_at, self.response_at, strict=True
        ):
            first = min(response, 1)
            starts += [prompt_at + prompt - 1, response_at]
            lengths += [first, response - first]
        return ranges(starts, lengths)

    def ends(self) -> Tensor:
        """Index of the last token of each row."""
        pairs = zip(self.prompts, self.responses, self.prompt_at, self.response_at, strict=True)
        return torch.tensor([(at + n if n else prompt_at + prompt) - 1 for prompt, n, prompt_at, at in pairs])

    def shared(self) -> SharedPrompts:
        """Mapping between stored tokens and whole sequences."""
        spread = ranges(
            [at for row in self.order for at in (self.prompt_at[row], self.response_at[row])],
            [length for row in self.order for length in (self.prompts[row], self.responses[row])],
        )
        starts = dict(zip(self.order, accumulate(map(self.length, self.order), initial=0), strict=False))
        kept = ranges(
            [at for f in self.families for at in (starts[f[0]], *(starts[row] + self.prompts[row] for row in f))],
            [length for f in self.families for length in (self.prompts[f[0]], *(self.responses[row] for row in f))],
        )
        return SharedPrompts(spread, kept)
