"""The memory of a process on a GPU, as logged."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from megarl.megatron.runtime.memory import DeviceMemory, _own_bytes

GIB = 2**30


@pytest.fixture
def own_bytes(monkeypatch):
    """Bytes of this process if NVML lists these processes: pairs of number and bytes."""

    def count(*processes):
        listed = [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in processes]
        nvml = SimpleNamespace(
            NVMLError=RuntimeError,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetComputeRunningProcesses=lambda handle: listed if handle == "GPU-1f" else [],
        )
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1f"))
        return _own_bytes(torch.device("cuda", 0))

    return count


def test_memory_outside_of_torch_is_the_rest_of_the_process(own_bytes):
    text = DeviceMemory(10 * GIB, 80 * GIB, 2 * GIB, own_bytes((1, 7 * GIB), (os.getpid(), 3 * GIB))).describe()
    assert "torch has 2.0 GiB, CUDA context, NCCL and libraries of this process 1.0 GiB" in text
    assert text.endswith("all processes 10.0 of 80.0 GiB")


def test_process_that_nvml_does_not_list_is_unknown(own_bytes):
    assert own_bytes((1, 7 * GIB)) is None
    assert "unknown" in DeviceMemory(10 * GIB, 80 * GIB, 2 * GIB, None).describe()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a driver")
def test_machine_without_a_driver_lists_no_process():
    """The installed NVML module raises at its start."""
    pytest.importorskip("pynvml")
    assert _own_bytes(torch.device("cuda", 0)) is None
