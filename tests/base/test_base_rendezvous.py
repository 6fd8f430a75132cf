"""The rendezvous store listens on one address only: any client that reaches it may read and write every key."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from support.expected_errors import raises

from megarl.base.ports import held_port
from megarl.base.rendezvous import host_store, join_rendezvous

LIMIT = timedelta(seconds=30)


def listening_addresses(port):
    """Addresses on which this process listens at a port, by the kernel's tables."""
    connections = psutil.Process().net_connections("inet")
    return [entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_store_listens_on_its_address_only_and_ends_with_the_object(host):
    store = host_store(host)
    port = store.port
    assert listening_addresses(port) in (["127.0.0.1"], ["::1"])
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert listening_addresses(port) == []


def test_ranks_meet_at_rank_0():
    with held_port("127.0.0.1") as port, ThreadPoolExecutor(2) as threads:
        stores = list(threads.map(lambda rank: join_rendezvous("127.0.0.1", port, rank, 2, LIMIT), (0, 1)))
    stores[1].set("from 1", "here")
    assert stores[0].get("from 1") == b"here"
    assert listening_addresses(port) == ["127.0.0.1"]


def test_rank_0_uses_the_store_of_torchruns_agent(monkeypatch):
    agent = host_store("127.0.0.1")
    agent.set("by", "agent")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert join_rendezvous("127.0.0.1", agent.port, 0, 1, LIMIT).get("by") == b"agent"


def test_foreign_address_and_taken_port_are_errors_with_the_address():
    with raises("launch.rendezvous-address", "192.0.2.1:0"):
        host_store("192.0.2.1")  # an address of the documentation range
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with raises("launch.rendezvous-address", f"127.0.0.1:{port}"):
            host_store("127.0.0.1", port)
