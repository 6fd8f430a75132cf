"""Proof that a plan writes every element of every destination exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megarl.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.sharding.parts import PlanPart
from megarl.sharding.plan import ReshardPlan

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, stop


def check_coverage(plan: ReshardPlan | PlanPart, params: Mapping[int, Sequence[LocalParam]]) -> None:
    """Checks a plan against what its destinations hold.

    Args:
        plan: the plan.
        params: by rollout rank, the parameters that the rank holds. Ranks that are not in the mapping are not
            checked, so each may check itself.

    Raises:
        WeightSyncError: an element of a parameter is written twice or never, vocabulary padding is written, or a
            parameter is written that the rank does not hold. Names the parameter, the rank and the first wrong
            rectangle.
    """
    for rank, held in params.items():
        written: dict[str, list[Box]] = defaultdict(list)
        for bucket in plan.received_by(rank):
            for move in bucket.moves:
                stop = tuple(a + n for a, n in zip(move.dst_start, move.shape, strict=True))
                written[move.dst_param].append((move.dst_start, stop))
        for param in held:
            _check_param(rank, param, written.pop(param.name, []))
        for name in written:
            raise WeightSyncError(f"the plan writes parameter '{name}' to rollout rank {rank}, which does not hold it")


def _check_param(rank: int, param: LocalParam, written: list[Box]) -> None:
    expected = [
        (piece.at, tuple(a + n for a, n in zip(piece.at, piece.local_shape, strict=True))) for piece in param.pieces
    ]
    if sorted(expected) == sorted(written):
        return
    # On the grid that all boundaries span, every rectangle is a block of whole cells: counting cells counts elements.
    boxes = [*expected, *written, ((0,) * len(param.shape), param.shape)]
    edges = [sorted({box[end][axis] for box in boxes for end in (0, 1)}) for axis in range(len(param.shape))]
    wrong = np.argwhere(_count(written, edges) != _count(expected, edges))
    if len(wrong) == 0:
        return
    cell = tuple(int(i) for i in wrong[0])
    start = [axis[i] for axis, i in zip(edges, cell, strict=True)]
    stop = [axis[i + 1] for axis, i in zip(edges, cell, strict=True)]
    times = int(_count(written, edges)[cell])
    should = int(_count(expected, edges)[cell])
    raise WeightSyncError(
        f"the plan writes elements {start} to {stop} of parameter '{param.name}' on rollout rank {rank} "
        f"{times} times instead of {should}"
    )


def _count(boxes: Iterable[Box], edges: list[list[int]]) -> np.ndarray:
    """How many boxes cover each cell of the grid."""
    counts = np.zeros([len(axis) - 1 for axis in edges], dtype=np.int32)
    position = [{edge: i for i, edge in enumerate(axis)} for axis in edges]
    for start, stop in boxes:
        cells = tuple(slice(p[a], p[b]) for p, a, b in zip(position, start, stop, strict=True))
        counts[cells] += 1
    return counts
