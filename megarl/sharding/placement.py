"""Layout of the rollout ranks, placement of both roles on nodes and devices, and the transport between two ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.base.errors import ConfigError
from megarl.base.processes import boot_id, process_namespace

AUTO, INLINE, SHARED_MEMORY, GLOO, CUDA_IPC, NCCL = "auto", "inline", "shared_memory", "gloo", "cuda_ipc", "nccl"
TRANSPORTS = (INLINE, SHARED_MEMORY, GLOO, CUDA_IPC, NCCL)
PROCESS_GROUP_TRANSPORTS = (GLOO, NCCL)
"""Transports that need a process group of training and rollout ranks."""

CPU = "cpu"


class RolloutLayout(NamedTuple):
    """Parallel sizes of the rollout role. Replica ``r`` has the ranks ``r * tp`` to ``r * tp + tp - 1``.

    Expert parallelism is inside the tensor-parallel ranks of a replica, as in SGLang. A layer's experts are
    divided over ``ep`` groups of ``tp / ep`` neighboring ranks, and each expert is split over its group's ranks.

    Attributes:
        tp: ranks of one replica.
        ep: groups that divide the experts.
        vocab_multiple: the engine rounds the vocabulary up to a multiple of this number before it divides the rows.
    """

    tp: int = 1
    ep: int = 1
    replicas: int = 1
    vocab_multiple: int = 1

    @property
    def world_size(self) -> int:
        """Number of rollout ranks."""
        return self.tp * self.replicas

    def describe(self) -> str:
        """Return a short form for logs, such as ``16 x TP8``."""
        return f"{self.replicas} x TP{self.tp}" + (f" EP{self.ep}" if self.ep > 1 else "")


class Slot(NamedTuple):
    """A node and one of its devices."""

    node: int
    device: int


@dataclass(frozen=True)
class Placement:
    """Node and device of every rank. Ranks in equal slots share a device and can read each other's memory."""

    train: tuple[Slot, ...]
    rollout: tuple[Slot, ...]

    @classmethod
    def of_devices(cls, train: Sequence[int], rollout: Sequence[int], devices_per_node: int) -> Placement:
        """Return the placement of ranks on devices that are numbered node by node."""
        return cls(*(tuple(Slot(*divmod(d, devices_per_node)) for d in devices) for devices in (train, rollout)))


class ProcessLocation(NamedTuple):
    """Node and device of a process.

    Attributes:
        node: equal for processes that can open each other's shared memory (same kernel and process namespace).
        device: ``cpu``, or the UUID of the GPU that the process computes on.
    """

    node: str
    device: str = CPU
    visible: tuple[str, ...] = ()


def current_location(device: str = CPU) -> ProcessLocation:
    """Return the location of this process.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:<n>``.
    """
    if not device.startswith("cuda"):
        return ProcessLocation(_node())
    import torch

    uuids = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    index = torch.device(device).index
    return ProcessLocation(_node(), uuids[torch.cuda.current_device() if index is None else index], uuids)


def _node() -> str:
    boot, namespace = boot_id(), process_namespace()
    return f"{boot}/{namespace}" if boot and namespace else socket.gethostname()  # not Linux


def choose_transport(source: ProcessLocation, target: ProcessLocation) -> str:
    """Choose the fastest transport: GPU memory that the target sees, NCCL between other GPUs, else host memory."""
    if CPU not in (source.device, target.device):
        is_visible = source.node == target.node and source.device in target.visible
        return CUDA_IPC if is_visible else NCCL
    return SHARED_MEMORY if source.node == target.node else GLOO


@dataclass(frozen=True)
class Routes:
    """The transport between each training rank and each rollout rank.

    Attributes:
        transport: one of :data:`TRANSPORTS` for all pairs, or ``auto``.
    """

    train: Sequence[ProcessLocation]
    rollout: Sequence[ProcessLocation]
    transport: str = AUTO

    def needs_rendezvous(self) -> bool:
        """Return whether some processes may have to join a process group."""
        if self.transport != AUTO:
            return self.transport in PROCESS_GROUP_TRANSPORTS
        nodes = {location.node for location in (*self.train, *self.rollout)}
        gpus = {location.device for location in self.train} - {CPU}
        hidden = any(location.device != CPU and gpus.difference(location.visible) for location in self.rollout)
        return len(nodes) > 1 or hidden

    def placement(self) -> Placement:
        """Return the placement for the plan, which prefers near senders. Processes on a CPU never share a device."""
        nodes: dict[str, int] = {}
        devices: dict[str, int] = {}
        slots = []
        for number, location in enumerate((*self.train, *self.rollout)):
            device = location.device if location.device != CPU else f"process {number}"
            slots.append(Slot(nodes.setdefault(location.node, len(nodes)), devices.setdefault(device, len(devices))))
        return Placement(tuple(slots[: len(self.train)]), tuple(slots[len(self.train) :]))

    def between(self, train_rank: int, rollout_rank: int) -> str:
        """Return the name of the transport from a training rank to a rollout rank.

        Raises:
            ConfigError: the configured transport cannot connect these two ranks.
        """
        source, target = self.train[train_rank], self.rollout[rollout_rank]
        if self.transport == AUTO:
            return choose_transport(source, target)
        problem = _problem(self.transport, source, target)
        if problem:
            raise ConfigError(
                f"sync.transport={self.transport}: {problem} (actor rank {train_rank}, rollout rank {rollout_rank}); "
                "use 'auto', which chooses the best transport for each pair of processes",
                code="sync.transport-unavailable",
            )
        return self.transport


def _problem(transport: str, source: ProcessLocation, target: ProcessLocation) -> str:
    """Return the reason why a transport cannot connect two locations; empty if it can."""
    if transport in (SHARED_MEMORY, CUDA_IPC) and source.node != target.node:
        return "the processes are on different nodes or in different containers"
    if transport in (CUDA_IPC, NCCL) and CPU in (source.device, target.device):
        return "it connects GPUs, and a process computes on the CPU"
    if transport == CUDA_IPC and source.device not in target.visible:
        return "the rollout process does not see the actor's GPU"
    if transport == NCCL and source.device == target.device:
        return "NCCL does not connect two processes that share a GPU"
    return ""
