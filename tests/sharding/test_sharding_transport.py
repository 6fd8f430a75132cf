import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from megarl.errors import ConfigError, WeightSyncError
from megarl.sharding.transport import SharedMemoryTransport, create_transport

READER = """
import pickle, sys, torch
from megarl.sharding.transport import create_transport
name, payload = pickle.load(sys.stdin.buffer)
flat = create_transport(name).unpack(payload)
print(flat.double().sum().item(), flat.numel())
"""
HOLDER = """
import pickle, sys, time, torch
from megarl.sharding.transport import create_transport
transport = create_transport("shared_memory")
payload = transport.pack([torch.ones(1000)])
sys.stdout.buffer.write(pickle.dumps(payload)); sys.stdout.flush()
time.sleep(60)
"""


def open_descriptors():
    """Descriptors of shared memory; what other tests of this process left open or closed late does not count."""
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("/memfd:") for link in links)


def shared_files():
    return set(os.listdir("/dev/shm"))


@pytest.fixture(params=["inline", "shared_memory"])
def transport(request):
    """Of each kind; whatever a test does, no descriptor and no file in /dev/shm may be left."""
    files, descriptors = shared_files(), open_descriptors()
    transport = create_transport(request.param)
    transport.kind = request.param
    yield transport
    transport.close()
    assert open_descriptors() == descriptors
    assert not {f for f in shared_files() - files if "megarl" in f}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_elements_arrive_in_order_and_bit_for_bit(transport, dtype):
    base = torch.arange(60).to(dtype).reshape(6, 10)
    tensors = [base[1:3, ::2], base[:, 4].clone(), base[5:], base[0, 0]]
    payload = pickle.loads(pickle.dumps(transport.pack(tensors)))
    flat = transport.unpack(payload)
    assert flat.dtype == dtype
    assert torch.equal(flat, torch.cat([t.flatten() for t in tensors]))


def test_nan_keeps_its_bits(transport):
    bits = torch.tensor([0x7FC00001, -1, -(2**31)], dtype=torch.int32)
    flat = transport.unpack(transport.pack([bits.view(torch.float32)]))
    assert torch.equal(flat.view(torch.int32), bits)


def test_a_process_that_is_no_relative_reads_it(transport):
    payload = transport.pack([torch.arange(1000.0)])
    for _ in range(2):  # any number of readers, one after the other; none of them removes it
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", READER],
            input=pickle.dumps((transport.kind, payload)),
            capture_output=True,
        )
        assert done.stderr == b"" and done.stdout.split() == [b"499500.0", b"1000"]
    assert transport.unpack(payload).sum() == 499500


def test_tensors_outlive_the_payload(transport):
    payload = transport.pack([torch.arange(10.0)])
    flat = transport.unpack(payload)
    transport.release(payload)
    transport.release(payload)
    transport.pack([torch.zeros(10)])
    assert flat.sum() == 45


def test_the_packed_values_are_a_copy(transport):
    weights = torch.ones(5)
    payload = transport.pack([weights])
    weights.zero_()
    transport.unpack(payload).add_(1) if transport.kind == "shared_memory" else None
    assert transport.unpack(payload).tolist() == [1] * 5


@pytest.mark.parametrize("tensors", [[], [torch.zeros(1), torch.zeros(1, dtype=torch.half)]])
def test_tensors_of_one_dtype_only(transport, tensors):
    with pytest.raises(WeightSyncError, match="tensors of one dtype"):
        transport.pack(tensors)


def test_a_read_only_array_as_an_object_store_gives_it(recwarn):
    transport = create_transport("inline")
    payload = transport.pack([torch.ones(3)])
    data = np.frombuffer(payload.data.tobytes(), dtype=np.uint8)
    assert not data.flags.writeable
    assert transport.unpack(payload._replace(data=data)).tolist() == [1, 1, 1]
    assert not recwarn.list


def test_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'nccl' is unknown; known ones: inline, shared_memory"):
        create_transport("nccl")


def test_a_released_payload_cannot_be_read():
    transport = create_transport("shared_memory")
    payload = transport.pack([torch.ones(3)])
    transport.release(payload)
    with pytest.raises(WeightSyncError, match="has released it"):
        transport.unpack(payload)


def test_another_file_under_the_same_descriptor_is_not_taken_for_it(tmp_path):
    transport = create_transport("shared_memory")
    payload = transport.pack([torch.ones(3)])
    transport.release(payload)
    (tmp_path / "other").write_bytes(b"x" * 100)
    descriptor = os.open(tmp_path / "other", os.O_RDWR)
    try:
        os.dup2(descriptor, payload.fd)
        with pytest.raises(WeightSyncError, match="cannot be opened"):
            transport.unpack(payload)
    finally:
        os.close(descriptor)
        if descriptor != payload.fd:
            os.close(payload.fd)


def test_memory_of_a_killed_process_is_gone():
    files = shared_files()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    try:
        payload = pickle.load(holder.stdout)
        assert create_transport("shared_memory").unpack(payload).sum() == 1000
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        with pytest.raises(WeightSyncError, match="the process is gone"):
            create_transport("shared_memory").unpack(payload)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert not {f for f in shared_files() - files if "megarl" in f}


def test_no_memory_is_said_and_leaves_nothing(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    before = open_descriptors()
    transport = create_transport("shared_memory")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(WeightSyncError, match=r"no shared memory for 12 bytes \(No space left on device\)"):
        transport.pack([torch.ones(3)])
    assert open_descriptors() == before


def test_elsewhere_than_on_linux_it_says_what_to_use(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(WeightSyncError, match="use 'inline'"):
        SharedMemoryTransport()
