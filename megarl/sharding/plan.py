"""The reshard plan: which training rank sends which rectangle of which parameter to which rollout rank, in which order.

A pure function of the weight map and both layouts. Source and destination shards are rectangles of the same Hugging
Face tensors, so a move is the intersection of two rectangles; no layout is special, nothing is gathered, and vocabulary
padding, which no rectangle covers, is never sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from megarl.models import LocalParam, ParallelLayout, Piece, WeightMap
from megarl.sharding.placement import Placement, RolloutLayout

Index = tuple[int, ...]


class Move(NamedTuple):
    """One rectangle of ``shape`` elements: from an offset in a training shard to an offset in a rollout shard.

    Where the rollout shard stacks several tensors (a layer's experts), ``dst_start`` and ``shape`` have one number more
    than ``src_start``, which comes first, and the rectangle is one element thick there.
    """

    src_rank: int
    src_param: str
    dst_rank: int
    dst_param: str
    src_start: Index
    dst_start: Index
    shape: Index


class Bucket(NamedTuple):
    """Moves that travel together, and how many bytes they are over all ranks."""

    moves: tuple[Move, ...]
    nbytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """All moves of one sync, in buckets to be applied in order.

    In no bucket does a rank send, or receive, more than the bucket size that the plan was built with.
    """

    buckets: tuple[Bucket, ...]
    float32_params: frozenset[str] = frozenset()
    """Names, at both ends, of parameters that travel in float32 whatever the number format of the others."""

    @property
    def nbytes(self) -> int:
        """Bytes moved by one sync, over all ranks."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def sent_by(self, rank: int) -> list[Bucket]:
        """What a training rank sends: one bucket per number, with this rank's moves; ``nbytes`` is over all ranks."""
        return [Bucket(tuple(m for m in b.moves if m.src_rank == rank), b.nbytes) for b in self.buckets]

    def received_by(self, rank: int) -> list[Bucket]:
        """What a rollout rank receives; as :meth:`sent_by`. Both list the moves between two ranks in one order."""
        return [Bucket(tuple(m for m in b.moves if m.dst_rank == rank), b.nbytes) for b in self.buckets]


class _Holder(NamedTuple):
    """A training shard that holds a rectangle at offset ``at``, on each of the ranks that hold the shard."""

    ranks: tuple[int, ...]
    pp: int
    param: str
    at: Index


_Rectangle = tuple[Index, Index]
_Sources = dict[str, dict[_Rectangle, list[_Holder]]]


class _Overlap(NamedTuple):
    """What a set of interchangeable source shards contributes to one destination parameter."""

    holders: list[_Holder]
    offset: Index  # in the source rectangle
    dst_start: Index
    shape: Index


def build_plan(
    weight_map: WeightMap,
    train: ParallelLayout,
    rollout: RolloutLayout,
    bucket_bytes: int,
    element_bytes: int,
    placement: Placement | None = None,
) -> ReshardPlan:
    """Plans the sync of one model.

    Args:
        weight_map: the model.
        train: layout of the ranks that send.
        rollout: layout of the ranks that receive.
        bucket_bytes: the most that one rank may send, and the most that one may receive, in one bucket.
        element_bytes: size of one element on the wire; of parameters that are kept in float32 it is 4 whatever this.
        placement: where every rank lives; None: all on one node, no two on one device.

    Returns:
        The plan; the same arguments give the same plan in every process. Among ranks that hold the same elements
        (replicas, unsplit parameters, tied copies) the one with the least to send so far is chosen.

    Raises:
        ValueError: ``bucket_bytes`` does not hold one element.
    """
    if bucket_bytes < element_bytes:
        raise ValueError(f"bucket_bytes={bucket_bytes} must hold at least one element of {element_bytes} bytes")
    sources = _source_rectangles(weight_map, train)
    rollout_tp, replicas = rollout.tp, rollout.replicas
    shards = [weight_map.rollout_params(rollout_tp, tp_rank, rollout.ep) for tp_rank in range(rollout_tp)]
    filler = _BucketFiller(bucket_bytes, element_bytes)
    for position in _interleaved_stages(shards[0], sources):
        for tp_rank, params in enumerate(shards):
            param = params[position]
            for overlap in _overlaps(param, sources):
                for replica in range(replicas):
                    filler.add(overlap, replica * rollout_tp + tp_rank, param.name)
    held = [*(param for param, _, _ in weight_map.shards(train)), *(param for shard in shards for param in shard)]
    float32 = {p.name for p in held if any(weight_map.is_float32(piece.hf_name) for piece in p.pieces)}
    return ReshardPlan(filler.buckets(), frozenset(float32))


def _source_rectangles(weight_map: WeightMap, train: ParallelLayout) -> _Sources:
    """For each Hugging Face tensor its partition into source rectangles, and who holds each."""
    sources: _Sources = defaultdict(lambda: defaultdict(list))
    for param, stage, ranks in weight_map.shards(train):
        for piece in param.pieces:
            holder = _Holder(ranks, stage, param.name, piece.at)
            sources[piece.hf_name][piece.start, piece.stop].append(holder)
    return sources


def _interleaved_stages(params: Sequence[LocalParam], sources: _Sources) -> list[int]:
    """Positions of parameters in an order in which the pipeline stages take turns, so that all of them send at once."""
    sent_before: dict[int, int] = defaultdict(int)
    turns = []
    for position, param in enumerate(params):
        holders = next(iter(sources[param.pieces[0].hf_name].values())) if param.pieces else []
        stage = holders[0].pp if holders else 0
        turns.append((sent_before[stage], stage, position))
        sent_before[stage] += 1
    return [position for _, _, position in sorted(turns)]


def _overlaps(param: LocalParam, sources: _Sources) -> Iterator[_Overlap]:
    for piece in param.pieces:
        for (start, stop), holders in sources[piece.hf_name].items():
            overlap = _intersect(piece, start, stop, holders)
            if overlap is not None:
                yield overlap


def _intersect(piece: Piece, start: Index, stop: Index, holders: list[_Holder]) -> _Overlap | None:
    low = tuple(map(max, piece.start, start))
    shape = tuple(b - a for a, b in zip(low, map(min, piece.stop, stop), strict=True))
    if min(shape) <= 0:
        return None
    offset = tuple(a - b for a, b in zip(low, start, strict=True))
    stack, at = _split_stack(piece.at, len(piece.start))
    dst_start = stack + tuple(a + b - c for a, b, c in zip(at, low, piece.start, strict=True))
    return _Overlap(holders, offset, dst_start, shape)


def _split_stack(at: Index, dimensions: int) -> tuple[Index, Index]:
    """An offset's position among stacked tensors, empty where nothing is stacked, and the offset within one."""
    return at[: len(at) - dimensions], at[len(at) - dimensions :]


@dataclass
class _BucketFiller:
    """Chooses senders and fills buckets, destination by destination in the order given."""

    bucket_bytes: int
    element_bytes: int
    _moves: list[list[Move]] = field(default_factory=list)
    _received: list[dict[int, int]] = field(default_factory=list)
    _sent: list[dict[int, int]] = field(default_factory=list)
    _current: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # by destination
    _load: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # elements, by source

    def add(self, overlap: _Overlap, dst_rank: int, dst_param: str) -> None:
        """Plans one overlap, in parts that fit a bucket."""
        for at, shape in _tiles(overlap.shape, self.bucket_bytes // self.element_bytes):
            elements = prod(shape)
            rank, holder = self._least_loaded(overlap.holders)
            self._load[rank] += elements
            src_start = tuple(map(sum, zip(holder.at, overlap.offset, at, strict=True)))
            stack, start = _split_stack(overlap.dst_start, len(at))
            dst_start = stack + tuple(map(sum, zip(start, at, strict=True)))
            extent = (1,) * len(stack) + shape
            move = Move(rank, holder.param, dst_rank, dst_param, src_start, dst_start, extent)
            self._place(move, elements * self.element_bytes)

    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets filled so far."""
        filled = zip(self._moves, self._sent, strict=True)
        return tuple(Bucket(tuple(moves), sum(sent.values())) for moves, sent in filled if moves)

    def _least_loaded(self, holders: list[_Holder]) -> tuple[int, _Holder]:
        candidates = {rank: holder for holder in holders for rank in holder.ranks}
        rank = min(candidates, key=lambda r: (self._load[r], r))
        return rank, candidates[rank]

    def _place(self, move: Move, nbytes: int) -> None:
        index = self._current[move.dst_rank]
        while not self._fits(index, move, nbytes):
            index += 1
        self._current[move.dst_rank] = index
        self._moves[index].append(move)
        self._received[index][move.dst_rank] += nbytes
        self._sent[index][move.src_rank] += nbytes

    def _fits(self, index: int, move: Move, nbytes: int) -> bool:
        if index == len(self._moves):
            self._moves.append([])
            self._received.append(defaultdict(int))
            self._sent.append(defaultdict(int))
        received = self._received[index][move.dst_rank]
        sent = self._sent[index][move.src_rank]
        return max(received, sent) + nbytes <= self.bucket_bytes


def _tiles(shape: Index, limit: int) -> Iterator[tuple[Index, Index]]:
    """Offsets and extents that cut a rectangle into parts of at most ``limit`` elements, along the first dimensions."""
    if prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    rows, *rest = shape
    row = prod(rest)
    if row <= limit:
        step = limit // row
        for first in range(0, rows, step):
            yield (first, *(0,) * len(rest)), (min(step, rows - first), *rest)
        return
    for index in range(rows):
        for at, extent in _tiles(tuple(rest), limit):
            yield (index, *at), (1, *extent)
