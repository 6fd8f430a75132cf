"""Transports: how packed bytes get from a training process into a rollout process."""

from megarl.sharding.transports.buffers import BufferPool, DeviceBuffer, HostBuffer, buffer_pool
from megarl.sharding.transports.cuda_ipc import CudaIpcTransport
from megarl.sharding.transports.gloo import GlooTransport
from megarl.sharding.transports.inline import InlineTransport
from megarl.sharding.transports.interface import (
    Buffer,
    Meeting,
    MemoryKind,
    Region,
    Transport,
    TransportOptions,
    create_transport,
    register_transport,
)
from megarl.sharding.transports.nccl import NcclTransport
from megarl.sharding.transports.point_to_point import host_store
from megarl.sharding.transports.shared_memory import SharedMemoryTransport

__all__ = [
    "Buffer",
    "BufferPool",
    "CudaIpcTransport",
    "DeviceBuffer",
    "GlooTransport",
    "HostBuffer",
    "InlineTransport",
    "Meeting",
    "MemoryKind",
    "NcclTransport",
    "Region",
    "SharedMemoryTransport",
    "Transport",
    "TransportOptions",
    "buffer_pool",
    "create_transport",
    "host_store",
    "register_transport",
]
