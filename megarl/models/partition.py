"""Shard geometry: the rectangles of Hugging Face tensors in a rank's shard, and chunks of logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LOGITS_CHUNK_BYTES = 256 * 2**20
"""Size of the float32 tensors that log-probs, entropies and the exact KL are computed in."""


def logits_chunk_rows(columns: int) -> int:
    """Return the number of tokens whose logits, a rank's ``columns``, are float32 at a time; at least 1."""
    return max(1, LOGITS_CHUNK_BYTES // (4 * max(columns, 1)))


class Piece(NamedTuple):
    """The rectangle ``[start, stop)`` of a Hugging Face tensor, stored at offset ``at`` of the local tensor.

    A local tensor that stacks several Hugging Face tensors has an additional first dimension. ``at`` then has one more
    number than ``start``, and the rectangle has size 1 in that dimension.
    """

    hf_name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of the rectangle in the Hugging Face tensor."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Extent of the rectangle in the local tensor."""
        return (1,) * (len(self.at) - len(self.start)) + self.shape


class LocalParam(NamedTuple):
    """One rank's shard of a parameter. Elements outside all pieces, such as vocabulary padding, are zeros."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class RowRange(NamedTuple):
    """Rows ``[start, stop)`` of a Hugging Face tensor."""

    hf_name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class FullTensor(NamedTuple):
    """A Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]


def stack_rows(name: str, parts: Iterable[RowRange]) -> LocalParam:
    """Concatenate row ranges along dimension 0."""
    pieces: list[Piece] = []
    height = 0
    rest: tuple[int, ...] = ()
    for part in parts:
        rest = part.shape[1:]
        zeros = (0,) * len(rest)
        pieces.append(Piece(part.hf_name, (part.start, *zeros), (part.stop, *rest), (height, *zeros)))
        height += part.stop - part.start
    return LocalParam(name, (height, *rest), tuple(pieces))


def replicated(name: str, tensors: Sequence[FullTensor]) -> LocalParam:
    """Replicate complete tensors, concatenated along dimension 0."""
    return stack_rows(name, [RowRange(t.name, t.shape, 0, t.shape[0]) for t in tensors])


def column_shard(name: str, tensors: Sequence[FullTensor], tp: int, tp_rank: int) -> LocalParam:
    """Concatenate this rank's rows of each tensor (gate, then up; q, k, v in the engine)."""
    return stack_rows(name, [_shard(t, tp, tp_rank) for t in tensors])


def grouped_shard(name: str, tensors: Sequence[FullTensor], groups: int, tp: int, tp_rank: int) -> LocalParam:
    """Shard Megatron's ``linear_qkv``: query heads, key and value of each key-value group of this rank."""
    per_rank = groups // tp
    mine = range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    return stack_rows(name, [_shard(t, groups, group) for group in mine for t in tensors])


def heads_shard(name: str, tensors: Sequence[FullTensor], groups: int, tp: int, tp_rank: int) -> LocalParam:
    """Shard the engine's ``qkv_proj``: this rank's query heads, then its keys, then its values.

    With more ranks than key-value heads, neighbouring ranks hold the same key-value head.

    Raises:
        ValueError: neither the key-value heads divide over the ranks nor the ranks over the heads.
    """
    if max(groups, tp) % min(groups, tp):
        raise ValueError(f"'{name}': {groups} key-value heads do not divide over {tp} ranks, nor the ranks over them")
    query, *key_value = tensors
    parts = min(groups, tp)
    shared = [_shard(t, parts, tp_rank * parts // tp) for t in key_value]
    return stack_rows(name, [_shard(query, tp, tp_rank), *shared])


def gated_shard(name: str, tensors: Sequence[FullTensor], groups: int, heads: int, tp: int, tp_rank: int) -> LocalParam:
    """Shard Megatron's ``linear_qkv`` with an output gate: of each key-value group queries, gates, key and value.

    In the first tensor each head's query is followed by its gate.
    """
    query, *key_value = tensors
    per_group, per_rank = heads // groups, groups // tp
    rows: list[RowRange] = []
    for group in range(tp_rank * per_rank, (tp_rank + 1) * per_rank):
        mine = range(group * per_group, (group + 1) * per_group)
        rows += [_shard(query, 2 * heads, 2 * head + half) for half in range(2) for head in mine]
        rows += [_shard(tensor, groups, group) for tensor in key_value]
    return stack_rows(name, rows)


class Sections(NamedTuple):
    """Rows of a tensor for each head, by kind of row.

    Attributes:
        heights: rows of a head in each section, such as its query, its key, its values.
        grouped: the tensor has the rows of one head after the other; otherwise one section after the other.
    """

    heads: int
    heights: tuple[int, ...]
    grouped: bool

    def shard(self, tensor: FullTensor, tp: int, tp_rank: int) -> list[RowRange]:
        """Return a rank's rows, one section after the other."""
        share = _divide(tensor, self.heads, tp)
        first, rows, before = tp_rank * share, list[RowRange](), 0
        for height in self.heights:
            if self.grouped:
                starts = [head * sum(self.heights) + before for head in range(first, first + share)]
                rows += [RowRange(tensor.name, tensor.shape, start, start + height) for start in starts]
                before += height
            else:
                start = before + first * height
                rows.append(RowRange(tensor.name, tensor.shape, start, start + share * height))
                before += self.heads * height
        return rows


def sectioned_shard(name: str, tensors: Sequence[tuple[FullTensor, Sections]], tp: int, tp_rank: int) -> LocalParam:
    """Stack a rank's rows of each tensor, section after section."""
    return stack_rows(name, [rows for tensor, sections in tensors for rows in sections.shard(tensor, tp, tp_rank)])


def row_shard(name: str, tensor: FullTensor, tp: int, tp_rank: int) -> LocalParam:
    """Shard the columns of ``tensor``, the inputs of a row-parallel layer."""
    return trimmed_shard(name, tensor, 1, tensor.shape[1], tp, tp_rank)


def vocab_shard(name: str, tensor: FullTensor, padded: int, tp: int, tp_rank: int) -> LocalParam:
    """Shard the rows of a tensor that is padded with zero rows to ``padded`` rows."""
    return trimmed_shard(name, tensor, 0, padded, tp, tp_rank)._replace(shape=(padded // tp, *tensor.shape[1:]))


def trimmed_shard(name: str, tensor: FullTensor, dimension: int, padded: int, tp: int, tp_rank: int) -> LocalParam:
    """Shard a dimension as if it were padded to ``padded``; the shard is without padding."""
    size, share = tensor.shape[dimension], _divide(tensor, padded, tp)
    start, stop = [0] * len(tensor.shape), list(tensor.shape)
    start[dimension], stop[dimension] = min(tp_rank * share, size), min((tp_rank + 1) * share, size)
    piece = Piece(tensor.name, tuple(start), tuple(stop), (0,) * len(start))
    return LocalParam(name, piece.shape, (piece,) if all(piece.shape) else ())


def stacked(name: str, params: Sequence[LocalParam]) -> LocalParam:
    """Stack parameters of equal shape along a new first dimension."""
    pieces = [piece._replace(at=(n, *piece.at)) for n, param in enumerate(params) for piece in param.pieces]
    return LocalParam(name, (len(params), *params[0].shape), tuple(pieces))


def _shard(tensor: FullTensor, parts: int, index: int) -> RowRange:
    height = _divide(tensor, tensor.shape[0], parts)
    return RowRange(tensor.name, tensor.shape, index * height, (index + 1) * height)


def _divide(tensor: FullTensor, size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"'{tensor.name}' of shape {list(tensor.shape)} does not divide into {parts} shards")
    return size // parts
