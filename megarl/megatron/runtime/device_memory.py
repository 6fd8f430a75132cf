"""Device memory of this process: torch's allocator, and outside it CUDA context, NCCL and libraries."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """Memory of one device in bytes.

    Attributes:
        used: by all processes.
        reserved: by torch's allocator in this process.
        process: by this process; None if NVML does not tell, as in a container with process numbers of its own.
    """

    used: int
    total: int
    reserved: int
    process: int | None

    def describe(self) -> str:
        """Describe the memory in one line, in GiB."""
        used, total, reserved = (f"{nbytes / 2**30:.1f}" for nbytes in (self.used, self.total, self.reserved))
        if self.process is None:
            own = f"torch has {reserved} GiB; the rest of this process is unknown, as NVML does not list it"
        else:
            outside = f"{(self.process - self.reserved) / 2**30:.1f}"
            own = f"torch has {reserved} GiB, CUDA context, NCCL and libraries of this process {outside} GiB"
        return f"{own}; all processes {used} of {total} GiB"


def read_device_memory(device: torch.device) -> DeviceMemory:
    """Measure a CUDA device with NVML and torch."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total - free, total, torch.cuda.memory_reserved(device), _own_bytes(_processes(device)))


def _processes(device: torch.device) -> Iterable[Any]:
    """NVML's processes of a device; none without NVML."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        processes: Iterable[Any] = nvml.nvmlDeviceGetComputeRunningProcesses(
            nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        )
    except nvml.NVMLError:  # MIG slices, old drivers
        return ()
    return processes


def _own_bytes(processes: Iterable[Any]) -> int | None:
    """Bytes of this process among NVML's, each with ``pid`` and ``usedGpuMemory``."""
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
