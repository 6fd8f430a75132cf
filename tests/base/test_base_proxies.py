"""Loopback requests of usual clients under a proxy that does not answer."""

import http.server
import os
import threading
import urllib.request

import httpx
import pytest
import requests

from megarl.base.proxies import bypass_proxies

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
