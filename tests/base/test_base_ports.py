"""Free ports, and ports that a socket reserves."""

import socket

import psutil
import pytest

from megarl.base import ports


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1"])
def test_free_port_can_be_bound_and_reserved_port_cannot(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as mine:
        mine.bind((host, ports.free_port(host)))
    with ports.reserve_port(host) as reserved, socket.socket(family) as mine, pytest.raises(OSError, match="in use"):
        mine.bind((host, reserved.getsockname()[1]))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_listens_on_its_reserved_port(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ports.held_port(host) as port:
        address = host, port
        with socket.create_server(address, family=family) as server, socket.create_connection(address) as client:
            assert server.accept()[1] == client.getsockname()
            with pytest.raises(OSError, match="in use"):
                socket.create_server(address, family=family)


def test_ports_in_use_are_skipped(monkeypatch):
    free = ports.free_port()
    with ports.reserve_port("") as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", [number] * 49 + [free])
        assert ports.free_port() == free
        monkeypatch.setattr(ports, "_PORTS", [number] * 50)
        with pytest.raises(OSError, match="none of 50 ports"):
            ports.free_port()


def test_collectives_listen_on_the_interface_of_the_address():
    """Linux reports interfaces and addresses in /proc; a node has at least loopback."""
    for address in ("127.0.0.1", "127.0.0.2"):  # the second: of another node of a cluster on this machine
        assert ports.collective_interfaces(address) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and name != "lo":
                assert ports.collective_interfaces(entry.address) == {"GLOO_SOCKET_IFNAME": name}
    assert ports.collective_interfaces("192.0.2.1") == {}, "an address of another machine"
