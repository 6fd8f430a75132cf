"""Checks of a weight sync: coverage of the plan, and checksums of every Hugging Face tensor at both ends.

The coverage check proves that a plan writes every element exactly once. The checksums prove that the engines hold the
trainer's weights. Each end computes them from its tensors and its list of pieces, independent of plan, buckets and
transports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megarl.base.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.sharding.plan import RankPlan, ReshardPlan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megarl.models.verification import ParamRectangle

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, stop


def check_coverage(plan: ReshardPlan | RankPlan, params: Mapping[int, Sequence[LocalParam]]) -> None:
    """Check that a plan writes every element of the receiving parameters exactly once.

    Args:
        params: parameters by rollout rank. Ranks that are absent are not checked, so each rank may check itself.

    Raises:
        WeightSyncError: an element is written twice or never, vocabulary padding is written, or the plan writes a
            parameter that the rank does not hold. Names the parameter, the rank and the first wrong elements.
    """
    for rank, held in params.items():
        written: dict[str, list[Box]] = defaultdict(list)
        for bucket in plan.received_by(rank):
            for op in bucket.ops:
                stop = tuple(a + n for a, n in zip(op.dst_start, op.shape, strict=True))
                written[op.dst_param].append((op.dst_start, stop))
        for param in held:
            _check_param(rank, param, written.pop(param.name, []))
        for name in written:
            text = f"the plan writes parameter '{name}' to rollout rank {rank}, which does not hold it"
            raise WeightSyncError(text, code="sync.plan-extra-parameter")


def _check_param(rank: int, param: LocalParam, written: list[Box]) -> None:
    expected = [
        (piece.at, tuple(a + n for a, n in zip(piece.at, piece.local_shape, strict=True))) for piece in param.pieces
    ]
    if sorted(expected) == sorted(written):
        return
    # On the grid spanned by all boundaries every box consists of whole cells, so counting cells counts elements.
    boxes = [*expected, *written, ((0,) * len(param.shape), param.shape)]
    edges = [sorted({box[end][axis] for box in boxes for end in (0, 1)}) for axis in range(len(param.shape))]
    wrong = np.argwhere(_count(written, edges) != _count(expected, edges))
    if len(wrong) == 0:
        return
    cell = tuple(int(i) for i in wrong[0])
    start = [axis[i] for axis, i in zip(edges, cell, strict=True)]
    stop = [axis[i + 1] for axis, i in zip(edges, cell, strict=True)]
    times, expected_times = (int(_count(boxes, edges)[cell]) for boxes in (written, expected))
    raise WeightSyncError(
        f"the plan writes elements {start} to {stop} of parameter '{param.name}' on rollout rank {rank} "
        f"{times} times instead of {expected_times}",
        code="sync.plan-coverage",
    )


def _count(boxes: Iterable[Box], edges: list[list[int]]) -> np.ndarray:
    counts = np.zeros([len(axis) - 1 for axis in edges], dtype=np.int32)
    position = [{edge: i for i, edge in enumerate(axis)} for axis in edges]
    for start, stop in boxes:
        cells = tuple(slice(p[a], p[b]) for p, a, b in zip(position, start, stop, strict=True))
        counts[cells] += 1
    return counts


class PartialChecksum(NamedTuple):
    """Checksum and number of the elements that one process holds of a Hugging Face tensor."""

    checksum: int
    """Sum of :func:`megarl.models.verification.rectangle_checksum` modulo 2**64."""
    elements: int

    def plus(self, other: PartialChecksum) -> PartialChecksum:
        """Return the checksum of both parts together."""
        return PartialChecksum((self.checksum + other.checksum) % 2**64, self.elements + other.elements)


NO_ELEMENTS = PartialChecksum(0, 0)


PartialChecksums = Mapping[str, PartialChecksum]
"""By Hugging Face name."""


def partial_checksums(
    params: Iterable[LocalParam],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    float32_params: Collection[str],
    convert: bool,
) -> dict[str, PartialChecksum]:
    """Compute the checksums of one process's parameters.

    Args:
        float32_params: names of parameters that are always sent in float32.
        convert: convert to the sent dtype first, as a sender does; otherwise another dtype is an error.

    Raises:
        WeightSyncError: an engine holds another dtype than the sent one, so that checksums cannot be compared.
    """
    params = tuple(params)
    rectangles = weight_rectangles(params, dtype, float32_params)
    return checksums_by_name(params, [part.checksum(tensors[part.name], convert=convert) for part in rectangles])


def weight_rectangles(
    params: Iterable[LocalParam], dtype: torch.dtype | str, float32_params: Collection[str]
) -> list[ParamRectangle]:
    """List the pieces of parameters, in order, as an engine computes their checksums; see :func:`partial_checksums`."""
    from megarl.models.verification import ParamRectangle

    sent = str(dtype).removeprefix("torch.")
    return [
        ParamRectangle(
            param.name,
            piece.at,
            piece.local_shape,
            piece.start,
            piece.shape,
            "float32" if param.name in float32_params else sent,
        )
        for param in params
        for piece in param.pieces
    ]


def checksums_by_name(params: Iterable[LocalParam], checksums: Sequence[int]) -> dict[str, PartialChecksum]:
    """Add up the checksums of :func:`weight_rectangles` by Hugging Face name."""
    sums: dict[str, PartialChecksum] = defaultdict(lambda: NO_ELEMENTS)
    pieces = (piece for param in params for piece in param.pieces)
    for piece, checksum in zip(pieces, checksums, strict=True):
        sums[piece.hf_name] = sums[piece.hf_name].plus(PartialChecksum(checksum, prod(piece.shape)))
    return dict(sums)


def compare_checksums(
    trainer: Sequence[PartialChecksums],
    rollout: Sequence[PartialChecksums],
    replica_size: int,
    numbers: Sequence[int] | None = None,
) -> None:
    """Compare the checksums of rollout ranks with the trainer's.

    Args:
        trainer: checksums of ranks that together hold each element exactly once.
        replica_size: ranks of one replica; several of them may hold the same elements.
        numbers: numbers of the compared replicas; None = 0, 1, ...

    Raises:
        WeightSyncError: a tensor differs or is incomplete; names the first one and the replica.
    """
    expected = _sum(trainer)
    for replica in range(len(rollout) // replica_size):
        held = _sum(rollout[replica * replica_size :][:replica_size])
        number = replica if numbers is None else numbers[replica]
        first = number * replica_size
        more = "" if replica_size == 1 else f" to {first + replica_size - 1}"
        owner = f"rollout replica {number} (rank {first}{more})"
        for name, partial in expected.items():
            _check(name, partial, held.get(name, NO_ELEMENTS), owner)
        unknown = held.keys() - expected.keys()
        if unknown:
            text = f"{owner} holds '{min(unknown)}', which the actor does not"
            raise WeightSyncError(text, code="sync.extra-parameter")


def _check(name: str, expected: PartialChecksum, held: PartialChecksum, owner: str) -> None:
    copies, rest = divmod(held.elements, expected.elements)
    if rest or not copies:
        raise WeightSyncError(
            f"{owner} holds {held.elements} elements of '{name}', the actor {expected.elements}: neither all of them "
            "nor the same number of copies of each",
            code="sync.element-count",
        )
    if held.checksum != expected.checksum * copies % 2**64:
        text = f"'{name}' of {owner} differs from the actor's, by checksum"
        raise WeightSyncError(text, code="sync.checksum-differs")


def _sum(checksums: Sequence[PartialChecksums]) -> dict[str, PartialChecksum]:
    total: dict[str, PartialChecksum] = defaultdict(lambda: NO_ELEMENTS)
    for rank_checksums in checksums:
        for name, partial in rank_checksums.items():
            total[name] = total[name].plus(partial)
    return total
