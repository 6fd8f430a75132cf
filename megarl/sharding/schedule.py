"""Which bucket each parcel travels in: all pairs of ranks at an even pace, and no rank above the bucket size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megarl.sharding.parcels import Column, Numbers, compact

_GOLDEN = (5**0.5 - 1) / 2
_LOOK_AHEAD = 1.3  # parcels looked at per bucket, relative to those that an ideal bucket holds


def schedule_buckets(source: Column, destination: Column, nbytes: Numbers, bucket_bytes: int) -> NDArray[np.int32]:
    """Numbers the bucket of each parcel.

    The ideal plan sends in each of ``n`` buckets one ``n``-th of what is between every two ranks: then every rank is
    as busy in each bucket as in any other, and ``n`` is as small as the busiest rank allows. Parcels are ordered by the
    time at which they would then be under way, and buckets filled in that order.

    Args:
        source: ``[parcels]``, training rank.
        destination: ``[parcels]``, rollout rank; ascending.
        nbytes: ``[parcels]``, each at most ``bucket_bytes``.
        bucket_bytes: the most that a rank sends, and the most that one receives, in one bucket.

    Returns:
        ``[parcels]``; the numbers begin at 0 and none is left out.
    """
    source, destination = compact(source), compact(destination)
    bucket = np.zeros(len(source), dtype=np.int32)
    order = np.argsort(_ideal_times(source, destination, nbytes), kind="stable").astype(np.int32)
    busiest = max(np.bincount(source, nbytes).max(), np.bincount(destination, nbytes).max())
    window = int(_LOOK_AHEAD * len(source) * bucket_bytes / busiest) + 1
    waiting, following, number = order[:0], 0, 0
    while len(waiting) or following < len(order):
        more = max(0, window - len(waiting))
        waiting = np.concatenate([waiting, order[following : following + more]])
        following += more
        sizes = nbytes[waiting]
        # The first that waits always fits. A parcel for which only the other rank has no room is counted here as if it
        # were taken; what a rank's bucket could have held instead comes in the next.
        taken = _fits(source[waiting], sizes, bucket_bytes) & _fits(destination[waiting], sizes, bucket_bytes)
        bucket[waiting[taken]] = number
        waiting = waiting[~taken]
        number += 1
    return bucket


def _ideal_times(source: Column, destination: Column, nbytes: Numbers) -> NDArray[np.uint16]:
    """When the middle of each parcel is under way, in units of 1 / 65536, if all pairs of ranks send evenly."""
    order = np.argsort(source, kind="stable")  # receivers ascend already
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(source[order]) != 0) | (np.diff(destination[order]) != 0)
    sizes = nbytes[order]
    first, of_pair = np.flatnonzero(begins), np.cumsum(begins, dtype=np.int32) - 1
    total = np.add.reduceat(sizes, first)
    middle = np.cumsum(sizes) - sizes / 2
    middle -= (np.cumsum(total) - total)[of_pair]
    middle /= total[of_pair]
    # Pairs with few parcels would all be under way at the same few times: each begins at a time of its own.
    middle += (np.arange(len(first)) * _GOLDEN % 1.0)[of_pair]
    middle *= 2**16
    times = np.empty(len(order), dtype=np.uint16)
    times[order] = middle.astype(np.int64).astype(np.uint16)  # a time after the end is one after the beginning
    return times


def _fits(rank: Column, nbytes: Numbers, limit: int) -> NDArray[np.bool_]:
    """Whether each parcel and all of the same rank before it are at most ``limit`` bytes."""
    order = np.argsort(rank, kind="stable")
    sizes = nbytes[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = np.diff(rank[order]) != 0
    total = np.cumsum(sizes)
    total -= (total - sizes)[begins][np.cumsum(begins) - 1]
    fits = np.empty(len(order), dtype=bool)
    fits[order] = total <= limit
    return fits
