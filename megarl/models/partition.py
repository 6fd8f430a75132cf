"""Geometry of shards: which rectangles of Hugging Face tensors make up one rank's piece of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """The rectangle ``[start, stop)`` of a Hugging Face tensor, found at offset ``at`` of the local tensor.

    A local tensor that stacks several Hugging Face tensors has a dimension more, which comes first: ``at`` then has one
    more number than ``start``, and the rectangle is one element thick there.
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
    """One rank's part of a parameter. Elements that no piece covers are vocabulary padding and hold zeros."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Rows(NamedTuple):
    """Rows ``[start, stop)`` of a Hugging Face tensor of the given shape."""

    hf_name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class FullTensor(NamedTuple):
    """A Hugging Face tensor by name and shape."""

    name: str
    shape: tuple[int, ...]


def stack_rows(name: str, parts: Iterable[Rows]) -> LocalParam:
    """Row ranges laid one under the other."""
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
    """The whole, on every rank."""
    return stack_rows(name, [Rows(t.name, t.shape, 0, t.shape[0]) for t in tensors])


def column_shard(name: str, tensors: Sequence[FullTensor], tp: int, tp_rank: int) -> LocalParam:
    """This rank's rows of each tensor, one tensor after the other (gate then up; q, k, v in the engine)."""
    return stack_rows(name, [_shard(t, tp, tp_rank) for t in tensors])


def grouped_shard(name: str, tensors: Sequence[FullTensor], groups: int, tp: int, tp_rank: int) -> LocalParam:
    """Megatron's ``linear_qkv``: for each key-value group of this rank its query heads, its key, its value."""
    per_rank = groups // tp
    mine = range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    return stack_rows(name, [_shard(t, groups, group) for group in mine for t in tensors])


def heads_shard(name: str, tensors: Sequence[FullTensor], groups: int, tp: int, tp_rank: int) -> LocalParam:
    """The engine's ``qkv_proj``: this rank's query heads, then its keys, then its values.

    Where there are more ranks than key-value heads, neighbouring ranks hold the same one.
    """
    if max(groups, tp) % min(groups, tp):
        raise ValueError(f"'{name}': {groups} key-value heads do not divide over {tp} ranks, nor the ranks over them")
    query, *key_value = tensors
    parts = min(groups, tp)
    shared = [_shard(t, parts, tp_rank * parts // tp) for t in key_value]
    return stack_rows(name, [_shard(query, tp, tp_rank), *shared])


def row_shard(name: str, tensor: FullTensor, tp: int, tp_rank: int) -> LocalParam:
    """This rank's columns of ``tensor``, the inputs of a row-parallel layer."""
    rows, columns = tensor.shape
    width = _divide(tensor, columns, tp)
    piece = Piece(tensor.name, (0, tp_rank * width), (rows, (tp_rank + 1) * width), (0, 0))
    return LocalParam(name, (rows, width), (piece,))


def vocab_shard(name: str, tensor: FullTensor, padded: int, tp: int, tp_rank: int) -> LocalParam:
    """This rank's rows of a tensor padded with zero rows to ``padded`` rows at its end."""
    vocab, *rest = tensor.shape
    height = padded // tp
    start = min(tp_rank * height, vocab)
    stop = min((tp_rank + 1) * height, vocab)
    pieces = stack_rows(name, [Rows(tensor.name, tensor.shape, start, stop)]).pieces if stop > start else ()
    return LocalParam(name, (height, *rest), pieces)


def stacked(name: str, params: Sequence[LocalParam]) -> LocalParam:
    """Parameters of equal shape one behind the other, along a new first dimension."""
    pieces = [piece._replace(at=(n, *piece.at)) for n, param in enumerate(params) for piece in param.pieces]
    return LocalParam(name, (len(params), *params[0].shape), tuple(pieces))


def _shard(tensor: FullTensor, parts: int, index: int) -> Rows:
    height = _divide(tensor, tensor.shape[0], parts)
    return Rows(tensor.name, tensor.shape, index * height, (index + 1) * height)


def _divide(tensor: FullTensor, size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"'{tensor.name}' of shape {list(tensor.shape)} does not divide into {parts} shards")
    return size // parts
