"""Where the two ends of a sync are: the rollout engine's layout, and on which node and device every rank lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RolloutLayout(NamedTuple):
    """Parallel sizes of the rollout role. Replica ``r`` has ranks ``r * tp`` to ``r * tp + tp - 1``.

    Expert parallelism lives inside the tensor-parallel ranks of a replica, as in SGLang: the experts of a layer are
    divided over ``ep`` groups of ``tp / ep`` neighbouring ranks, and each expert is split over the ranks of its group.

    Attributes:
        tp: ranks of one replica.
        ep: groups that divide the experts.
        replicas: number of engines.
    """

    tp: int = 1
    ep: int = 1
    replicas: int = 1

    @property
    def world_size(self) -> int:
        """Number of rollout ranks."""
        return self.tp * self.replicas

    def describe(self) -> str:
        """Short form for logs, such as ``16 x TP8``."""
        return f"{self.replicas} x TP{self.tp}" + (f" EP{self.ep}" if self.ep > 1 else "")


class Slot(NamedTuple):
    """Where a process lives: a node, and a device of it."""

    node: int
    device: int


@dataclass(frozen=True)
class Placement:
    """Where every rank of both roles lives. Ranks in equal slots share a device and reach each other's memory.

    Attributes:
        train: slot of each training rank.
        rollout: slot of each rollout rank.
    """

    train: tuple[Slot, ...]
    rollout: tuple[Slot, ...]

    @classmethod
    def of_devices(cls, train: Sequence[int], rollout: Sequence[int], devices_per_node: int) -> Placement:
        """Placement of ranks on devices that are numbered node by node.

        Args:
            train: device of each training rank.
            rollout: device of each rollout rank.
            devices_per_node: devices of every node.
        """
        return cls(*(tuple(Slot(*divmod(d, devices_per_node)) for d in devices) for devices in (train, rollout)))
