"""Transports of weight syncs: shared memory, Ray's object store, gloo, CUDA IPC and NCCL."""

from megarl.sharding.transports.cuda_ipc import CudaIpcTransport
from megarl.sharding.transports.host_memory import InlineTransport, SharedMemoryTransport
from megarl.sharding.transports.interface import (
    BUFFERS,
    Buffer,
    BufferPool,
    BufferSlice,
    DeviceBuffer,
    MemoryKind,
    Rendezvous,
    SharedHostBuffer,
    Transport,
    TransportOptions,
    buffer_pool,
    create_transport,
    register_transport,
)
from megarl.sharding.transports.process_group import GlooTransport, NcclTransport

__all__ = [
    "BUFFERS",
    "Buffer",
    "BufferPool",
    "BufferSlice",
    "CudaIpcTransport",
    "DeviceBuffer",
    "GlooTransport",
    "InlineTransport",
    "MemoryKind",
    "NcclTransport",
    "Rendezvous",
    "SharedHostBuffer",
    "SharedMemoryTransport",
    "Transport",
    "TransportOptions",
    "buffer_pool",
    "create_transport",
    "register_transport",
]
