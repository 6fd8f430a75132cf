"""Proof that engines hold the trainer's weights: checksums of every Hugging Face tensor, taken at both ends.

They are taken of what the model and the engine hold, each by its own list of rectangles, and so they do not depend on
the plan, the buckets or the transports that they are to check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from megarl.errors import WeightSyncError
from megarl.models import LocalParam

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Share(NamedTuple):
    """What one process holds of a Hugging Face tensor."""

    checksum: int
    """Sum of :func:`megarl.models.checksum.rectangle_checksum` modulo 2**64."""
    elements: int

    def plus(self, other: Share) -> Share:
        """Of both together."""
        return Share((self.checksum + other.checksum) % 2**64, self.elements + other.elements)


NOTHING = Share(0, 0)
Shares = Mapping[str, Share]
"""By Hugging Face name."""


def shares_of(
    params: Iterable[LocalParam],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    float32_params: Collection[str],
    convert: bool,
) -> dict[str, Share]:
    """What a process holds.

    Args:
        params: its parameters.
        tensors: their values by name.
        dtype: number format in which the weights are sent.
        float32_params: names of parameters that are sent in float32 whatever ``dtype``.
        convert: convert to what is sent first, as a sender does; otherwise another number format is an error.

    Raises:
        WeightSyncError: an engine holds another number format than was sent, so that checksums say nothing.
    """
    import torch

    from megarl.models.checksum import rectangle_checksum

    shares: dict[str, Share] = defaultdict(lambda: NOTHING)
    for param in params:
        tensor, sent = tensors[param.name], torch.float32 if param.name in float32_params else dtype
        if tensor.dtype != sent and not convert:
            raise WeightSyncError(
                f"parameter '{param.name}' of the engine is {tensor.dtype} and was sent as {sent}; a verified sync "
                "must send the engine's dtype"
            )
        for piece in param.pieces:
            box = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.local_shape, strict=True))
            checksum = rectangle_checksum(tensor[box].reshape(piece.shape), piece.start, sent)
            shares[piece.hf_name] = shares[piece.hf_name].plus(Share(checksum, prod(piece.shape)))
    return dict(shares)


def check_shares(trainer: Sequence[Shares], rollout: Sequence[Shares], replica_size: int) -> None:
    """Compares what all rollout ranks hold with the trainer's.

    Args:
        trainer: of ranks that together hold each element exactly once.
        rollout: of every rollout rank, by rank.
        replica_size: ranks of one replica; within it, ranks may hold the same elements.

    Raises:
        WeightSyncError: a tensor differs or is not held whole; names the first and the replica.
    """
    expected = _sum(trainer)
    for replica in range(len(rollout) // replica_size):
        first = replica * replica_size
        held = _sum(rollout[first : first + replica_size])
        where = f"rollout replica {replica} (rank {first}" + (
            ")" if replica_size == 1 else f" to {first + replica_size - 1})"
        )
        for name, share in expected.items():
            _check(name, share, held.get(name, NOTHING), where)
        unknown = held.keys() - expected.keys()
        if unknown:
            raise WeightSyncError(f"{where} holds '{min(unknown)}', which the actor does not")


def _check(name: str, expected: Share, held: Share, where: str) -> None:
    copies, rest = divmod(held.elements, expected.elements)
    if rest or not copies:
        raise WeightSyncError(
            f"{where} holds {held.elements} elements of '{name}', the actor {expected.elements}: neither all of them "
            "nor the same number of copies of each"
        )
    if held.checksum != expected.checksum * copies % 2**64:
        raise WeightSyncError(f"'{name}' of {where} differs from the actor's, by checksum")


def _sum(shares: Sequence[Shares]) -> dict[str, Share]:
    total: dict[str, Share] = defaultdict(lambda: NOTHING)
    for one in shares:
        for name, share in one.items():
            total[name] = total[name].plus(share)
    return total
