"""Which of the training ranks that hold the same elements sends them: the nearest, and among those each its share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.sharding.parcels import Column, Numbers, ParcelTable
from megarl.sharding.placement import Placement, RolloutLayout, Slot


def choose_sources(
    table: ParcelTable, rollout: RolloutLayout, num_sources: int, placement: Placement | None
) -> NDArray[np.int32]:
    """The training rank that sends each parcel to each replica.

    A holder on the receiver's device comes first, then one on its node, then any. Among holders that are equally near,
    bytes are divided so that all have sent as much, as far as whole parcels allow; each serves neighbouring receivers,
    so that few pairs of ranks talk to each other.

    Returns:
        ``[replicas, parcels]``.
    """
    blocks = _Blocks.of(table, rollout.replicas)
    places = _Places.of(table, rollout, num_sources, placement)
    key = places.nearest(blocks.holders, blocks.destination(rollout))
    return _divide(table, blocks, key, places)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Runs of a replica's parcels between the same ranks; those of every replica are alike."""

    first: Numbers  # [blocks], first parcel
    of_parcel: Numbers  # [parcels]
    holders: Column  # [blocks]
    target: Column  # [blocks]
    nbytes: Numbers  # [blocks]
    replicas: int

    @classmethod
    def of(cls, table: ParcelTable, replicas: int) -> _Blocks:
        begins = np.ones(len(table.target), dtype=bool)
        begins[1:] = (np.diff(table.target) != 0) | (np.diff(table.holders) != 0)
        first = np.flatnonzero(begins)
        nbytes = np.add.reduceat(table.parcel_nbytes, first)
        return cls(first, np.cumsum(begins) - 1, table.holders[first], table.target[first], nbytes, replicas)

    def destination(self, rollout: RolloutLayout) -> Numbers:
        """``[replicas, blocks]``, the rollout rank."""
        return np.arange(self.replicas)[:, None] * rollout.tp + self.target


@dataclass(frozen=True, eq=False)
class _Places:
    """Who holds a set's shard at which place: a device, a node, or anywhere.

    A key stands for one set of holders at one place: ``place * sets + set``. Places are numbered: anywhere (0), the
    nodes, the devices.
    """

    sets: int
    keys: Numbers  # ascending; with ranks: every holder of every set, at each of its three places
    ranks: Numbers
    device_of: Numbers  # [rollout ranks], place number
    node_of: Numbers

    @classmethod
    def of(cls, table: ParcelTable, rollout: RolloutLayout, num_sources: int, placement: Placement | None) -> _Places:
        train_places, rollout_places = _place_numbers(placement, num_sources, rollout.world_size)
        sets = len(table.holder_sets)
        number = np.repeat(np.arange(sets), [len(ranks) for ranks in table.holder_sets])
        ranks = np.concatenate(table.holder_sets)
        keys = np.concatenate([place[ranks] * sets + number for place in train_places])
        ranks = np.tile(ranks, len(train_places))
        order = np.lexsort((ranks, keys))
        return cls(sets, keys[order], ranks[order], *rollout_places)

    def nearest(self, holders: Column, destination: Numbers) -> Numbers:
        """Key of the nearest place of each receiver at which there is a holder."""
        key = np.broadcast_to(holders.astype(np.int64), destination.shape)
        for place in (self.node_of, self.device_of):
            near = place[destination] * self.sets + holders
            at = np.searchsorted(self.keys, near).clip(max=len(self.keys) - 1)
            key = np.where(self.keys[at] == near, near, key)
        return key

    def candidates(self, key: int) -> Numbers:
        """Ranks of a key, ascending."""
        return self.ranks[slice(*np.searchsorted(self.keys, (key, key + 1)))]


def _place_numbers(
    placement: Placement | None, num_sources: int, num_receivers: int
) -> tuple[list[Numbers], tuple[Numbers, Numbers]]:
    """Place numbers of the training ranks (anywhere, node, device) and of the rollout ranks (device, node)."""
    if placement is None:
        nowhere = np.full(num_receivers, -1)
        return [np.zeros(num_sources, dtype=np.int64)], (nowhere, nowhere)
    for role, slots, ranks in (
        ("train", placement.train, num_sources),
        ("rollout", placement.rollout, num_receivers),
    ):
        if len(slots) != ranks:
            raise ValueError(f"placement.{role} names the slots of {len(slots)} ranks, the layout has {ranks}")
    everyone: list[Slot] = [*placement.train, *placement.rollout]
    _, node = np.unique([slot.node for slot in everyone], return_inverse=True)
    _, device = np.unique(np.asarray(everyone, dtype=np.int64), axis=0, return_inverse=True)
    node, device = node.ravel() + 1, device.ravel() + node.max() + 2
    cut = num_sources
    return [np.zeros(cut, dtype=np.int64), node[:cut], device[:cut]], (device[cut:], node[cut:])


def _divide(table: ParcelTable, blocks: _Blocks, key: Numbers, places: _Places) -> NDArray[np.int32]:
    """Divides the bytes of each key over its candidates, and finds whose each parcel is."""
    order = np.argsort(key, axis=None, kind="stable")  # within a key: receiver by receiver
    nbytes = np.broadcast_to(blocks.nbytes, key.shape).ravel()[order]
    begin = np.empty(key.size, dtype=np.int64)
    begin[order] = np.cumsum(nbytes) - nbytes
    unique, first = np.unique(key.ravel()[order], return_index=True)
    starts, total = begin[order[first]], np.add.reduceat(nbytes, first)
    ends, ranks = _shares(unique, starts, total, places)
    # A parcel belongs to the candidate in whose share its middle lies.
    within = np.cumsum(table.parcel_nbytes) - table.parcel_nbytes // 2
    within -= (np.cumsum(blocks.nbytes) - blocks.nbytes)[blocks.of_parcel]
    middle = begin.reshape(key.shape)[:, blocks.of_parcel]
    middle += within
    return ranks[np.searchsorted(ends, middle - 1, side="right").clip(max=len(ranks) - 1)]


def _shares(
    keys: Numbers, starts: Numbers, total: Numbers, places: _Places
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Where in the sequence of all bytes each candidate's share ends, and whose it is; keys follow each other there."""
    load = np.zeros(int(places.ranks.max()) + 1)
    candidates = [places.candidates(key) for key in keys]
    ends: list[NDArray[np.float64]] = [np.empty(0)] * len(keys)
    # Those without a choice first, so that those with the most choice make up for all others.
    for position in np.argsort([len(ranks) for ranks in candidates], kind="stable"):
        ranks = candidates[position]
        share = _level(load[ranks], float(total[position])) if len(ranks) > 1 else np.array([float(total[position])])
        load[ranks] += share
        # Rounding must not carry a share into the next key, whose candidates hold other elements.
        ends[position] = starts[position] + np.minimum(np.cumsum(share), total[position])
        ends[position][-1] = starts[position] + total[position]
    return np.concatenate(ends), np.concatenate(candidates).astype(np.int32)


def _level(load: NDArray[np.float64], amount: float) -> NDArray[np.float64]:
    """What each rank adds to its load, in sum ``amount``, so that those that add anything end at one level."""
    rising = np.sort(load)
    # With the k lowest ranks filled to one level, that level is (amount + their loads) / k.
    levels = (amount + np.cumsum(rising)) / np.arange(1, len(load) + 1)
    level = levels[np.flatnonzero(levels >= rising)[-1]]
    return np.maximum(level - load, 0.0)
