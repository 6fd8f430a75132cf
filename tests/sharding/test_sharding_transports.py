import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.expected_errors import raises

from megarl.base.rendezvous import host_store
from megarl.sharding.transports import memory as ipc
from megarl.sharding.transports.interface import (
    BufferPool,
    BufferSlice,
    DeviceBuffer,
    Rendezvous,
    SharedHostBuffer,
    TransportOptions,
    create_transport,
)
from megarl.sharding.transports.memory import CudaIpcTransport, SharedMemoryTransport

CPU = torch.device("cpu")
ON_CPU = TransportOptions(CPU)
READER = """
import pickle, sys, torch
from megarl.sharding.transports.interface import TransportOptions, create_transport
name, handle = pickle.load(sys.stdin.buffer)
((rank, data),) = create_transport(name, TransportOptions(torch.device("cpu"))).receive({0: handle})
print(data.view(torch.float32).double().sum().item(), len(data))
"""
HOLDER = """
import pickle, sys, time, torch
from megarl.sharding.transports.interface import SharedHostBuffer, BufferSlice, TransportOptions, create_transport
buffer = SharedHostBuffer(4000)
buffer.data.view(torch.float32).fill_(1)
options = TransportOptions(torch.device("cpu"))
handle = create_transport("shared_memory", options).send(BufferSlice(buffer, 0, 4000), 0, 0)
sys.stdout.buffer.write(pickle.dumps(handle)); sys.stdout.flush()
time.sleep(600)
"""


def open_descriptors():
    """Descriptors of shared memory, without those of other tests."""
    gc.collect()
    peers = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            peers.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("/memfd:") for link in peers)


def shared_files():
    return set(os.listdir("/dev/shm"))


def packed(values):
    buffer = SharedHostBuffer(values.numel() * values.element_size())
    buffer.data.view(values.dtype).copy_(values)
    return buffer


def received(transport, handle):
    ((rank, data),) = transport.receive({3: handle})
    assert rank == 3
    return data


class Pair:
    """Both ends of a transport: of a training rank and of a rollout rank."""

    def __init__(self, name, session=0):
        self.name, self.store = name, host_store("127.0.0.1")
        self.sender, self.receiver = (
            create_transport(
                name,
                TransportOptions(CPU, rendezvous=Rendezvous(rank, 1, 2, (1 - rank,), "127.0.0.1", self.store.port)),
            )
            for rank in range(2)
        )
        self.open(session)

    def open(self, session):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda end: end.open(session), (self.sender, self.receiver)))

    def carry(self, buffer_slice, tag=0):
        handle = pickle.loads(pickle.dumps(self.sender.send(buffer_slice, 0, tag)))
        ((_, data),) = self.receiver.receive({0: handle})
        data = data.clone()
        self.receiver.settle()
        self.sender.finish(handle)
        return data


@pytest.fixture(params=["inline", "shared_memory", "gloo"])
def pair(request):
    """Both ends of each transport; no test may leave a descriptor or a file in /dev/shm."""
    files, descriptors = shared_files(), open_descriptors()
    both = Pair(request.param)
    yield both
    both.receiver.end(False)
    both.sender.end(False)
    assert open_descriptors() == descriptors
    assert not {f for f in shared_files() - files if "megarl" in f}


def test_buffer_slices_arrive_bit_for_bit_after_each_refill(pair):
    buffer = SharedHostBuffer(3000)
    for tag in range(4):
        values = torch.randint(0, 256, (3000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(tag))
        buffer.data.copy_(values)
        for start, stop in ((0, 1001), (1001, 1002), (1002, 3000)):
            assert torch.equal(pair.carry(BufferSlice(buffer, start, stop), tag), values[start:stop])
    buffer.close()


def test_two_buckets_are_in_flight_at_once(pair):
    buffers = [packed(torch.full((100,), float(n))) for n in range(2)]
    handles = [pair.sender.send(BufferSlice(buffer, 0, 400), 0, tag) for tag, buffer in enumerate(buffers)]
    for tag, handle in enumerate(handles):
        ((_, data),) = pair.receiver.receive({0: handle})
        assert data.view(torch.float32).tolist() == [float(tag)] * 100
        pair.receiver.settle()
        pair.sender.finish(handle)


def test_after_a_failure_a_new_session_starts_clean(pair):
    buffer = packed(torch.zeros(100))
    pair.sender.send(BufferSlice(buffer, 0, 400), 0, 0)  # nobody receives it
    pair.receiver.end(False)
    pair.sender.end(False)
    pair.open(1)
    buffer.data.view(torch.float32).fill_(7)
    assert pair.carry(BufferSlice(buffer, 0, 400)).view(torch.float32).tolist() == [7] * 100


@pytest.mark.parametrize("name", ["inline", "shared_memory"])
def test_an_unrelated_process_reads_the_slice(name):
    buffer = packed(torch.arange(1000.0))
    handle = create_transport(name, ON_CPU).send(BufferSlice(buffer, 400, 4000), 0, 0)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READER], input=pickle.dumps((name, handle)), capture_output=True
    )
    assert done.stderr == b"" and done.stdout.split() == [b"494550.0", b"3600"]  # without 0 to 99


def test_inline_accepts_a_read_only_array_of_an_object_store(recwarn):
    transport, buffer = create_transport("inline", ON_CPU), packed(torch.ones(3))
    handle = transport.send(BufferSlice(buffer, 0, 12), 0, 0)
    data = np.frombuffer(handle.data.tobytes(), dtype=np.uint8)
    assert not data.flags.writeable
    assert received(transport, handle._replace(data=data)).view(torch.float32).tolist() == [1, 1, 1]
    assert not recwarn.list


def test_unknown_transport_lists_the_known_ones():
    with raises("config.unknown-name", "sync.transport='mpi'", "cuda_ipc, gloo, inline, nccl, shared_memory"):
        create_transport("mpi", ON_CPU)


def test_a_transport_has_no_device_unless_its_process_names_one():
    with pytest.raises(TypeError, match="device"):
        TransportOptions()


# ---- shared memory


def test_a_closed_buffer_cannot_be_read():
    transport, buffer = create_transport("shared_memory", ON_CPU), packed(torch.ones(3))
    handle = transport.send(BufferSlice(buffer, 0, 12), 0, 0)
    buffer.close()
    with raises("sync.buffer-unreachable", handle.pid, "'inline'"):
        received(transport, handle)


def test_another_file_under_the_same_descriptor_is_refused(tmp_path):
    transport, buffer = create_transport("shared_memory", ON_CPU), packed(torch.ones(3))
    handle = transport.send(BufferSlice(buffer, 0, 12), 0, 0)
    buffer.close()
    (tmp_path / "other").write_bytes(b"x" * 100)
    descriptor = os.open(tmp_path / "other", os.O_RDWR)
    try:
        os.dup2(descriptor, handle.fd)
        with raises("sync.buffer-unreachable", handle.pid):
            received(transport, handle)
    finally:
        os.close(descriptor)
        if descriptor != handle.fd:
            os.close(handle.fd)


def test_shared_memory_of_a_killed_process_is_freed():
    files = shared_files()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    try:
        handle = pickle.load(holder.stdout)
        assert received(create_transport("shared_memory", ON_CPU), handle).view(torch.float32).sum() == 1000
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=120)
        with raises("sync.buffer-unreachable", handle.pid):
            received(create_transport("shared_memory", ON_CPU), handle)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert not {f for f in shared_files() - files if "megarl" in f}


def test_a_receiver_keeps_no_more_than_two_buffers_of_a_sender_mapped():
    transport = create_transport("shared_memory", ON_CPU)
    for _ in range(5):
        buffer = packed(torch.ones(3))
        received(transport, transport.send(BufferSlice(buffer, 0, 12), 0, 0))
        buffer.close()
    assert [len(buffers) for buffers in transport._mapped.values()] == [2]


def test_exhausted_memory_is_reported_without_a_leak(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    before = open_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with raises("sync.no-shared-memory", "12 bytes", "No space left on device", "sync.bucket_megabytes"):
        SharedHostBuffer(12)
    assert open_descriptors() == before


def test_shared_memory_needs_linux_and_the_error_names_inline(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with raises("sync.needs-linux", "'shared_memory'", "'inline'"):
        SharedMemoryTransport(ON_CPU)
    assert len(SharedHostBuffer(12).data) == 12  # in which inline and gloo pack there


# ---- buffers


def test_a_pool_allocates_two_buffers_and_reuses_them():
    created = []

    def allocate(nbytes):
        created.append(DeviceBuffer(nbytes, torch.device("cpu")))
        return created[-1]

    pool = BufferPool(allocate, 100)
    for _ in range(3):
        first, second = pool.take(), pool.take()
        with raises("sync.buffers-in-use", "2 weight buffers"):
            pool.take()
        pool.give_back(first)
        assert pool.take() is first
        pool.give_back(second)
        pool.give_back(first)
    assert len(created) == 2 and pool.peak_bytes == pool.held_bytes == 200
    pool.close()
    assert pool.held_bytes == 0 and pool.peak_bytes == 200


# ---- messages


def test_a_lost_peer_is_reported():
    pair = Pair("gloo")
    handle = pair.sender.send(BufferSlice(packed(torch.zeros(1000)), 0, 4000), 0, 0)
    pair.sender.end(False)
    with raises("sync.transfer-failed", "receive from training rank 0"):
        list(pair.receiver.receive({0: handle}))


def test_a_missing_store_is_reported(monkeypatch):
    from datetime import timedelta

    from megarl.sharding.transports import process_group

    monkeypatch.setattr(process_group, "STORE_TIMEOUT", timedelta(seconds=1))
    transport = create_transport("gloo", TransportOptions(CPU, rendezvous=Rendezvous(0, 1, 2, (1,), "127.0.0.1", 9)))
    with raises("sync.group-join", "training rank 0", "127.0.0.1:9"):
        transport.open(0)


def test_only_needed_peers_are_awaited_and_a_missing_one_is_named():
    """Of training rank 0 and rollout ranks 0 to 2, the last one is missing; only the first two exchange weights."""
    store = host_store("127.0.0.1")

    def end(rank, peers, timeout_s):
        rendezvous = Rendezvous(rank, 1, 4, peers, "127.0.0.1", store.port)
        return create_transport("gloo", TransportOptions(CPU, rendezvous=rendezvous, timeout_s=timeout_s))

    ends = end(0, (1,), 60), end(1, (0,), 60)  # held: an end that is freed closes its connection under the other
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda end: end.open(0), ends))
    with raises("sync.peer-timeout", "rollout rank 1 waited 0.2 s (sync.timeout_s) for training rank 0"):
        end(2, (0,), 0.2).open(1)
    with raises("sync.peer-timeout", "training rank 0 waited 0.2 s (sync.timeout_s) for rollout rank 2"):
        end(0, (3,), 0.2).open(1)


def test_send_without_an_open_sync_is_an_error():
    transport = create_transport("gloo", TransportOptions(CPU, rendezvous=Rendezvous(0, 1, 2, (1,))))
    with raises("sync.not-open", "send to rollout rank 0"):
        transport.send(BufferSlice(packed(torch.zeros(1)), 0, 4), 0, 0)


def test_nccl_refuses_a_process_on_the_cpu():
    with raises("sync.nccl-needs-gpu", "'nccl'", "computes on cpu", "sync.transport", "'gloo'"):
        create_transport("nccl", TransportOptions(CPU, rendezvous=Rendezvous(0, 1, 2, (1,))))


class SilentGroup:
    """An NCCL group whose peer is lost: calls are accepted, and their messages never complete."""

    def __init__(self, *arguments):
        self.handling = os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        self.aborted = False

    def send(self, tensors, rank, tag):
        return self

    def wait(self):
        return True

    def abort(self):
        self.aborted = True


class StreamEvent:
    """A CUDA event; ``done`` is the state of its stream."""

    done = False

    def record(self):
        pass

    def query(self):
        return self.done


@pytest.fixture
def nccl(monkeypatch):
    """A sender over NCCL with one peer, in an open session; CUDA's calls are recorded."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    group = type("ProcessGroupNCCL", (SilentGroup,), {"Options": type("Options", (), {})})
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", group, raising=False)
    rendezvous = Rendezvous(0, 1, 2, (1,))
    transport = create_transport("nccl", TransportOptions(torch.device("cuda"), 0, rendezvous, 0.2))
    transport._group = transport._join(None)
    return transport


def test_a_lost_peer_over_nccl_is_an_error_in_time_and_ends_no_process(nccl, monkeypatch):
    """Torch's own watchdog would abort the process of the trainer."""
    group = nccl._group
    assert group.handling == "0" and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    message = nccl.send(BufferSlice(packed(torch.zeros(1)), 0, 4), 0, 7)
    with raises("sync.transfer-timeout", "send to rollout rank 0 within 0.2 s (sync.timeout_s)"):
        nccl.finish(message)
    assert group.aborted
    with raises("sync.not-open", "send to rollout rank 0"):
        nccl.send(BufferSlice(packed(torch.zeros(1)), 0, 4), 0, 8)


def test_a_sync_over_nccl_ends_when_its_messages_have_left(nccl, monkeypatch):
    message = nccl.send(BufferSlice(packed(torch.zeros(1)), 0, 4), 0, 7)
    with raises("sync.transfer-timeout"):
        nccl.end(completed=True)
    nccl._group = nccl._join(None)
    message = nccl.send(BufferSlice(packed(torch.zeros(1)), 0, 4), 0, 7)
    monkeypatch.setattr(StreamEvent, "done", True)
    nccl.end(completed=True)
    assert message not in nccl._sends and not nccl._group.aborted


# ---- CUDA's handles, as far as they go without CUDA


class FakeHandles:
    """Fake IPC handles of torch; counts how often each is created and opened, and on which device."""

    def __init__(self, monkeypatch, uuids=("GPU-b", "GPU-a")):
        self.created, self.opened, self.buffers = [], [], {}
        monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", self.make)
        monkeypatch.setattr(ipc, "_uuid", lambda device: uuids[device.index] if device.index is not None else "GPU-a")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))

    def make(self, data):
        self.created.append(data)
        return rebuild, (len(self.created) - 1, *range(1, ipc.DEVICE_ARGUMENT), "the sender's index", "requires grad")


def rebuild(number, *arguments):
    HANDLES.opened.append((number, arguments[ipc.DEVICE_ARGUMENT - 1]))
    return HANDLES.created[number]


@pytest.fixture
def handles(monkeypatch):
    global HANDLES
    HANDLES = FakeHandles(monkeypatch)
    return HANDLES


def test_a_gpu_buffer_is_opened_once_per_receiver_and_sync(handles):
    sender, receiver = (CudaIpcTransport(ON_CPU) for _ in range(2))
    buffers = [DeviceBuffer(100, torch.device("cpu")) for _ in range(2)]
    for sync in range(2):
        for bucket in range(6):
            buffer = buffers[bucket % 2]
            buffer.data.fill_(bucket)
            handle = pickle.loads(pickle.dumps(sender.send(BufferSlice(buffer, 10, 30), 0, bucket)))
            assert received(receiver, handle).tolist() == [bucket] * 20
            receiver.settle()
            sender.finish(handle)
        receiver.end(True)
        sender.end(True)
        # On the receiver the GPU has another number than on the sender.
        assert handles.opened[2 * sync :] == [(2 * sync, 1), (2 * sync + 1, 1)]


def test_each_receiver_gets_its_own_handle(handles):
    sender = CudaIpcTransport(ON_CPU)
    buffer = DeviceBuffer(100, torch.device("cpu"))
    for receiver in (0, 1, 0, 1):
        sender.send(BufferSlice(buffer, 0, 10), receiver, 0)
    assert len(handles.created) == 2


def test_an_invisible_gpu_is_named(handles, monkeypatch):
    sender = CudaIpcTransport(ON_CPU)
    handle = sender.send(BufferSlice(DeviceBuffer(100, torch.device("cpu")), 0, 10), 0, 0)
    with raises("sync.gpu-not-visible", "GPU-z", "CUDA_VISIBLE_DEVICES", "sync.transport"):
        received(CudaIpcTransport(ON_CPU), handle._replace(uuid="GPU-z"))


def test_a_buffer_of_an_earlier_sync_is_refused(handles):
    sender = CudaIpcTransport(ON_CPU)
    buffer = DeviceBuffer(100, torch.device("cpu"))
    sender.send(BufferSlice(buffer, 0, 10), 0, 0)
    second = sender.send(BufferSlice(buffer, 0, 10), 0, 1)
    with raises("sync.buffer-not-opened", "training rank 3"):
        received(CudaIpcTransport(ON_CPU), second)


def test_position_of_the_device_among_torchs_arguments():
    """The argument of torch's function that names the device of the memory."""
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[ipc.DEVICE_ARGUMENT] == "storage_device"
