"""Where processes run, and which transport leads from one to another."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.errors import ConfigError
from megarl.sharding.placement import Placement, Slot

AUTO, INLINE, SHARED_MEMORY, GLOO, CUDA_IPC, NCCL = "auto", "inline", "shared_memory", "gloo", "cuda_ipc", "nccl"
TRANSPORTS = (INLINE, SHARED_MEMORY, GLOO, CUDA_IPC, NCCL)
JOINED = (GLOO, NCCL)
"""Transports for which training and rollout ranks meet in a process group of their own."""
CPU = "cpu"


class ProcessPlace(NamedTuple):
    """Where a process runs.

    Attributes:
        node: equal for processes that can open each other's shared memory: those of one kernel and one process
            namespace.
        device: ``cpu``, or the UUID of the GPU that it computes on.
        visible: UUIDs of all GPUs that it can open memory of.
    """

    node: str
    device: str = CPU
    visible: tuple[str, ...] = ()


def this_place(device: str = CPU) -> ProcessPlace:
    """Where this process runs.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:<n>``.
    """
    if not device.startswith("cuda"):
        return ProcessPlace(_node())
    import torch

    uuids = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    index = torch.device(device).index
    return ProcessPlace(_node(), uuids[torch.cuda.current_device() if index is None else index], uuids)


def _node() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def choose_transport(source: ProcessPlace, target: ProcessPlace) -> str:
    """The shortest way: GPU memory where the target can open it, then shared memory, then the network."""
    both_gpu = CPU not in (source.device, target.device)
    if source.node == target.node:
        return CUDA_IPC if both_gpu and source.device in target.visible else SHARED_MEMORY
    return NCCL if both_gpu else GLOO


@dataclass(frozen=True)
class Routes:
    """The transport between each training rank and each rollout rank.

    Attributes:
        train: places of the training ranks.
        rollout: places of the rollout ranks.
        transport: one of :data:`TRANSPORTS` for all of them, or ``auto``.
    """

    train: Sequence[ProcessPlace]
    rollout: Sequence[ProcessPlace]
    transport: str = AUTO

    def need_meeting(self) -> bool:
        """Whether some of the processes may have to meet in a process group."""
        nodes = {place.node for place in (*self.train, *self.rollout)}
        return self.transport in JOINED or (self.transport == AUTO and len(nodes) > 1)

    def placement(self) -> Placement:
        """The same for the plan, which prefers a near sender. Of processes on a CPU no two share a device."""
        nodes: dict[str, int] = {}
        devices: dict[str, int] = {}
        slots = []
        for number, place in enumerate((*self.train, *self.rollout)):
            device = place.device if place.device != CPU else f"process {number}"
            slots.append(Slot(nodes.setdefault(place.node, len(nodes)), devices.setdefault(device, len(devices))))
        return Placement(tuple(slots[: len(self.train)]), tuple(slots[len(self.train) :]))

    def between(self, train_rank: int, rollout_rank: int) -> str:
        """Name of the transport from a training rank to a rollout rank.

        Raises:
            ConfigError: the configured one cannot lead there.
        """
        source, target = self.train[train_rank], self.rollout[rollout_rank]
        if self.transport == AUTO:
            return choose_transport(source, target)
        problem = _problem(self.transport, source, target)
        if problem:
            raise ConfigError(
                f"sync.transport={self.transport}: {problem} (actor rank {train_rank}, rollout rank {rollout_rank}); "
                "use 'auto', which takes the best way between each two processes"
            )
        return self.transport


def _problem(transport: str, source: ProcessPlace, target: ProcessPlace) -> str:
    """Why a transport does not lead from one place to another; empty where it does."""
    if transport in (SHARED_MEMORY, CUDA_IPC) and source.node != target.node:
        return "the processes are on different nodes or in different containers"
    if transport in (CUDA_IPC, NCCL) and CPU in (source.device, target.device):
        return "it connects GPUs, and a process computes on the CPU"
    if transport == CUDA_IPC and source.device not in target.visible:
        return "the rollout process does not see the actor's GPU"
    if transport == NCCL and source.device == target.device:
        return "NCCL does not connect two processes that share a GPU"
    return ""
