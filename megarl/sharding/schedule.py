"""Scheduling of transfers: the sending rank and the bucket of each.

:func:`choose_sources` picks the nearest holder and balances the bytes among equally near ones. :func:`schedule_buckets`
spreads the traffic of every pair of ranks evenly over the buckets and keeps every rank below the bucket size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.sharding.placement import Placement, RolloutLayout, Slot
from megarl.sharding.transfers import Column, Numbers, TransferTable, compact

_GOLDEN = (5**0.5 - 1) / 2
_LOOK_AHEAD = 1.3  # transfers looked at per bucket, relative to those that an ideal bucket holds


def choose_sources(
    table: TransferTable, rollout: RolloutLayout, replicas: range, num_sources: int, placement: Placement | None
) -> NDArray[np.int32]:
    """Choose the training rank that sends each transfer to each replica of a wave.

    A holder on the receiver's device comes first, then one on its node, then any. Among equally near holders the bytes
    are divided evenly, in whole transfers. Each holder serves neighboring receivers, so that few pairs of ranks
    communicate.

    Returns:
        ``[replicas, transfers]``, training ranks.

    Raises:
        ValueError: the placement has another number of ranks than the layouts.
    """
    runs = _Runs.of(table)
    locations = _Locations.of(table, rollout, num_sources, placement)
    key = locations.nearest(runs.holders, np.asarray(replicas)[:, None] * rollout.tp + runs.target)
    return _divide(table, runs, key, locations)


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of a replica's transfers between the same ranks; equal for all replicas."""

    transfer_run: Numbers  # [transfers]
    holders: Column  # [runs]
    target: Column  # [runs]
    nbytes: Numbers  # [runs]

    @classmethod
    def of(cls, table: TransferTable) -> _Runs:
        begins = np.ones(len(table.target), dtype=bool)
        begins[1:] = (np.diff(table.target) != 0) | (np.diff(table.holders) != 0)
        first = np.flatnonzero(begins)
        nbytes = np.add.reduceat(table.transfer_nbytes, first)
        return cls(np.cumsum(begins) - 1, table.holders[first], table.target[first], nbytes)


@dataclass(frozen=True, eq=False)
class _Locations:
    """The holders of each set at each location: a device, a node, or anywhere.

    A key is one set of holders at one location: ``location * sets + set``. Location 0 is anywhere; the nodes follow,
    then the devices.
    """

    sets: int
    keys: Numbers  # ascending; with ranks: every holder of every set, at each of its three locations
    ranks: Numbers
    device_of: Numbers  # [rollout ranks], location number
    node_of: Numbers

    @classmethod
    def of(
        cls, table: TransferTable, rollout: RolloutLayout, num_sources: int, placement: Placement | None
    ) -> _Locations:
        train_locations, rollout_locations = _location_numbers(placement, num_sources, rollout.world_size)
        sets = len(table.holder_sets)
        number = np.repeat(np.arange(sets), [len(ranks) for ranks in table.holder_sets])
        ranks = np.concatenate(table.holder_sets)
        keys = np.concatenate([location[ranks] * sets + number for location in train_locations])
        ranks = np.tile(ranks, len(train_locations))
        order = np.lexsort((ranks, keys))
        return cls(sets, keys[order], ranks[order], *rollout_locations)

    def nearest(self, holders: Column, destination: Numbers) -> Numbers:
        """Return the key of the nearest location with a holder, for each receiver."""
        key = np.broadcast_to(holders.astype(np.int64), destination.shape)
        for location in (self.node_of, self.device_of):
            near = location[destination] * self.sets + holders
            at = np.searchsorted(self.keys, near).clip(max=len(self.keys) - 1)
            key = np.where(self.keys[at] == near, near, key)
        return key


def _location_numbers(
    placement: Placement | None, num_sources: int, num_receivers: int
) -> tuple[list[Numbers], tuple[Numbers, Numbers]]:
    """Return location numbers of training ranks (anywhere, node, device) and of rollout ranks (device, node)."""
    if placement is None:
        unknown = np.full(num_receivers, -1)
        return [np.zeros(num_sources, dtype=np.int64)], (unknown, unknown)
    for role, role_slots, ranks in (
        ("train", placement.train, num_sources),
        ("rollout", placement.rollout, num_receivers),
    ):
        if len(role_slots) != ranks:
            raise ValueError(f"placement.{role} has slots of {len(role_slots)} ranks, the layout has {ranks} ranks")
    slots: list[Slot] = [*placement.train, *placement.rollout]
    _, node = np.unique([slot.node for slot in slots], return_inverse=True)
    _, device = np.unique(np.asarray(slots, dtype=np.int64), axis=0, return_inverse=True)
    node, device = node.ravel() + 1, device.ravel() + node.max() + 2
    cut = num_sources
    return [np.zeros(cut, dtype=np.int64), node[:cut], device[:cut]], (device[cut:], node[cut:])


def _divide(table: TransferTable, runs: _Runs, key: Numbers, locations: _Locations) -> NDArray[np.int32]:
    """Divide the bytes of each key among its candidates, and return the sender of each transfer."""
    order = np.argsort(key, axis=None, kind="stable")  # within a key: receiver by receiver
    nbytes = np.broadcast_to(runs.nbytes, key.shape).ravel()[order]
    begin = np.empty(key.size, dtype=np.int64)
    begin[order] = np.cumsum(nbytes) - nbytes
    unique, first = np.unique(key.ravel()[order], return_index=True)
    starts, total = begin[order[first]], np.add.reduceat(nbytes, first)
    ends, ranks = _shares(unique, starts, total, locations)
    # The candidate whose share contains the middle of a transfer sends it.
    within = np.cumsum(table.transfer_nbytes) - table.transfer_nbytes // 2
    within -= (np.cumsum(runs.nbytes) - runs.nbytes)[runs.transfer_run]
    middle = begin.reshape(key.shape)[:, runs.transfer_run]
    middle += within
    senders: NDArray[np.int32] = ranks[np.searchsorted(ends, middle - 1, side="right").clip(max=len(ranks) - 1)]
    return senders


def _shares(
    keys: Numbers, starts: Numbers, total: Numbers, locations: _Locations
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return the end of each candidate's share in the sequence of all bytes, and the candidate's rank.

    The keys follow each other in that sequence.
    """
    load = np.zeros(int(locations.ranks.max()) + 1)
    candidates = [locations.ranks[slice(*np.searchsorted(locations.keys, (key, key + 1)))] for key in keys]
    ends: list[NDArray[np.float64]] = [np.empty(0)] * len(keys)
    # Keys with the fewest candidates first: keys with more candidates even out the load afterwards.
    for position in np.argsort([len(ranks) for ranks in candidates], kind="stable"):
        ranks = candidates[position]
        share = _level(load[ranks], float(total[position])) if len(ranks) > 1 else np.array([float(total[position])])
        load[ranks] += share
        # Rounding must not extend a share into the next key, whose candidates hold other elements.
        ends[position] = starts[position] + np.minimum(np.cumsum(share), total[position])
        ends[position][-1] = starts[position] + total[position]
    return np.concatenate(ends), np.concatenate(candidates).astype(np.int32)


def _level(load: NDArray[np.float64], amount: float) -> NDArray[np.float64]:
    """Return the bytes to add to each rank, ``amount`` in total, so that all increased ranks end at one load."""
    rising = np.sort(load)
    # With the k lowest ranks filled to one level, that level is (amount + their loads) / k.
    levels = (amount + np.cumsum(rising)) / np.arange(1, len(load) + 1)
    level = levels[np.flatnonzero(levels >= rising)[-1]]
    added: NDArray[np.float64] = np.maximum(level - load, 0.0)
    return added


def schedule_buckets(
    source: Column, destination: Column, nbytes: Numbers, bucket_bytes: int, *, together: bool = False
) -> NDArray[np.int32]:
    """Assign a bucket number to each transfer.

    The ideal schedule of ``n`` buckets sends one ``n``-th of the bytes between every two ranks in each bucket. Then
    every rank is equally busy in all buckets, and ``n`` is as small as the busiest rank allows. Transfers are ordered
    by their time in the ideal schedule, and the buckets are filled in this order.

    Args:
        source: ``[transfers]``, training rank.
        destination: ``[transfers]``, rollout rank; ascending.
        nbytes: ``[transfers]``, each at most ``bucket_bytes``.
        bucket_bytes: maximum bytes that a rank sends, and that a rank receives, in one bucket.
        together: all pairs of ranks go through their transfers, which have layer order, at the same time, so that a
            matrix's parts arrive soon after each other; otherwise each pair starts at its own point,
            which fills the buckets more evenly.

    Returns:
        ``[transfers]``, bucket numbers from 0 on without gaps.
    """
    source, destination = compact(source), compact(destination)
    bucket = np.zeros(len(source), dtype=np.int32)
    order = np.argsort(_ideal_times(source, destination, nbytes, together), kind="stable").astype(np.int32)
    busiest = max(np.bincount(source, nbytes).max(), np.bincount(destination, nbytes).max())
    window = int(_LOOK_AHEAD * len(source) * bucket_bytes / busiest) + 1
    waiting, following, number = order[:0], 0, 0
    while len(waiting) or following < len(order):
        more = max(0, window - len(waiting))
        waiting = np.concatenate([waiting, order[following : following + more]])
        following += more
        sizes = nbytes[waiting]
        # The first waiting transfer always fits. A transfer that fits only one of its two ranks still counts as taken
        # at that rank; the transfers that could have replaced it go to the next bucket.
        taken = _fits(source[waiting], sizes, bucket_bytes) & _fits(destination[waiting], sizes, bucket_bytes)
        bucket[waiting[taken]] = number
        waiting = waiting[~taken]
        number += 1
    return bucket


def _ideal_times(source: Column, destination: Column, nbytes: Numbers, together: bool) -> NDArray[np.uint16]:
    """Return the time of each transfer's middle in the ideal schedule, in units of 1 / 65536."""
    order = np.argsort(source, kind="stable")  # receivers ascend already
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(source[order]) != 0) | (np.diff(destination[order]) != 0)
    sizes = nbytes[order]
    first, of_pair = np.flatnonzero(begins), np.cumsum(begins, dtype=np.int32) - 1
    total = np.add.reduceat(sizes, first)
    middle = np.cumsum(sizes) - sizes / 2
    middle -= (np.cumsum(total) - total)[of_pair]
    middle /= total[of_pair]
    if not together:
        # Pairs with few transfers would share the same few times, so each pair gets an offset.
        middle += (np.arange(len(first)) * _GOLDEN % 1.0)[of_pair]
    middle *= 2**16
    times = np.empty(len(order), dtype=np.uint16)
    times[order] = middle.astype(np.int64).astype(np.uint16)  # times wrap around at the end
    return times


def _fits(rank: Column, nbytes: Numbers, limit: int) -> NDArray[np.bool_]:
    """Whether each transfer, with all earlier ones of the same rank, is within ``limit`` bytes."""
    order = np.argsort(rank, kind="stable")
    sizes = nbytes[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = np.diff(rank[order]) != 0
    total = np.cumsum(sizes)
    total -= (total - sizes)[begins][np.cumsum(begins) - 1]
    fits = np.empty(len(order), dtype=bool)
    fits[order] = total <= limit
    return fits
