"""Free ports, ports that a socket reserves, and loopback requests under a proxy that does not answer."""

import http.server
import os
import socket
import threading
import urllib.request

import httpx
import psutil
import pytest
import requests

from megarl.base import ports
from megarl.base.ports import bypass_proxies


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


CLIENTS = {
    # urlopen would keep the opener, and with it the proxies, of an earlier request of this process.
    "urllib": lambda url: urllib.request.build_opener().open(url, timeout=60).read(),
    "httpx": lambda url: httpx.get(url, timeout=60).content,
    "requests": lambda url: requests.get(url, timeout=60).content,
}


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *args): ...


@pytest.fixture(scope="module")
def port():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def proxied(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "corp.example")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_clients_reach_this_machine(proxied, port, client, host):
    with pytest.raises(Exception, match=r"(?i)refused|proxy"):
        CLIENTS[client](f"http://{host}:{port}/")
    bypass_proxies()
    assert CLIENTS[client](f"http://{host}:{port}/") == b"hello"


def test_other_hosts_are_added_to_those_of_the_user(proxied, monkeypatch):
    bypass_proxies("10.0.0.5")
    bypass_proxies("10.0.0.5")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "corp.example,localhost,127.0.0.1,::1,10.0.0.5"


def test_an_environment_without_proxy_stays(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    before = dict(os.environ)
    bypass_proxies("10.0.0.5")
    assert dict(os.environ) == before
