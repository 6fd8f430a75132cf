"""Devices of this machine, and the probe of a cluster's address, with real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from support.expected_errors import raises

from megarl.base.errors import ResourceError
from megarl.base.ports import held_port
from megarl.cluster import availability
from megarl.cluster.availability import check_cluster_answers, local_node

SETTINGS_FRAME = b"\0\0\0\x04\0\0\0\0\0"


@pytest.mark.parametrize(
    ("present", "visible", "gpus"), [(0, None, 0), (8, None, 8), (8, "2,3", 2), (8, "", 0), (1, "0,1", 1)]
)
def test_gpus_of_this_machine_are_those_that_ray_would_have(monkeypatch, present, visible, gpus):
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: present)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_node() == {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(gpus)}


@pytest.fixture
def serve():
    """``serve(reply)``: a server that sends a reply to each connection, or with b"" is silent; returns its address."""
    servers: list[socket.socket] = []

    def answer(server, reply):
        with contextlib.suppress(OSError):  # the end of the server
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(ConnectionError):
                    received = connection.recv(100)
                    assert received.startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                    connection.sendall(reply)
                    connection.recv(1)  # until the client ends

    def start(reply):
        servers.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=answer, args=(servers[-1], reply), daemon=True).start()
        return f"127.0.0.1:{servers[-1].getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def test_a_grpc_server_passes(serve):
    check_cluster_answers(serve(SETTINGS_FRAME), timeout_s=60)
    check_cluster_answers(f"ray://{serve(SETTINGS_FRAME)}", timeout_s=60)


def test_a_hung_server_is_no_cluster(serve):
    address, begin = serve(b""), time.monotonic()
    with pytest.raises(ResourceError) as caught:
        check_cluster_answers(address, timeout_s=0.6)
    assert str(caught.value) == (
        f"no Ray cluster answers at {address}: no answer, tried for 0.6 s. Start one there (`ray start --head`, or "
        "`megarl launch`), or unset RAY_ADDRESS: the run then starts Ray on this machine [ray.no-cluster]"
    )
    assert time.monotonic() - begin < 30


def test_a_web_server_is_no_cluster(serve, monkeypatch):
    """The pauses between the attempts take no time, so the server has a minute for each answer."""
    pauses: list[float] = []
    monkeypatch.setattr(availability, "_RETRY_S", 25.0)
    monkeypatch.setattr(availability, "sleep", pauses.append)
    monkeypatch.setattr(availability, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(pauses)))
    address = serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with raises("ray.no-cluster", address, "no gRPC server", "60 s", "RAY_ADDRESS"):
        check_cluster_answers(address, timeout_s=60)
    assert len(pauses) == 3


def test_a_dead_address_fails_after_the_time_of_the_probe():
    with held_port("127.0.0.1") as port:  # nobody listens there
        begin = time.monotonic()
        with raises("ray.no-cluster", f"127.0.0.1:{port}", "Connection refused", "0.5 s"):
            check_cluster_answers(f"127.0.0.1:{port}", timeout_s=0.5)
        assert 0.4 < time.monotonic() - begin < 30


def test_a_cluster_that_starts_during_the_probe_is_found(monkeypatch):
    answers = iter([ConnectionRefusedError(111, "Connection refused"), None])

    def connect(*_):
        if (error := next(answers)) is not None:
            raise error
        return True

    monkeypatch.setattr(availability, "_is_grpc_server", connect)
    check_cluster_answers("head:6379")


@pytest.mark.parametrize("address", ["not an address", "head", ":6379"])
def test_malformed_addresses_are_refused_at_once(address):
    with raises("ray.no-cluster", address, "host:port"):
        check_cluster_answers(address)


def test_names_that_ray_resolves_are_not_probed():
    check_cluster_answers("auto")
    check_cluster_answers("local")
