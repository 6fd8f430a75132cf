"""The memory of a process on a GPU, as logged."""

import os
from types import SimpleNamespace

import pytest
import torch

from megarl.megatron.runtime.device_memory import DeviceMemory, _own_bytes, _processes

GIB = 2**30


def test_memory_outside_of_torch_is_the_rest_of_the_process():
    processes = [SimpleNamespace(pid=1, usedGpuMemory=7 * GIB), SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB)]
    text = DeviceMemory(10 * GIB, 80 * GIB, 2 * GIB, _own_bytes(processes)).describe()
    assert "torch has 2.0 GiB, CUDA context, NCCL and libraries of this process 1.0 GiB" in text
    assert text.endswith("all processes 10.0 of 80.0 GiB")


def test_process_that_nvml_does_not_list_is_unknown():
    assert _own_bytes([SimpleNamespace(pid=1, usedGpuMemory=7 * GIB)]) is None
    assert "unknown" in DeviceMemory(10 * GIB, 80 * GIB, 2 * GIB, None).describe()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a driver")
def test_machine_without_a_driver_lists_no_process(monkeypatch):
    """The installed NVML module raises at its start."""
    pytest.importorskip("pynvml")
    assert list(_processes(torch.device("cuda", 0))) == []
