"""Servers whose forks are the drivers and workers of jobs, one of each for all processes of a parallel test run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megarl.base.packages import is_installed
from megarl.cluster.fork_server import ENVIRONMENT, IF_INSTALLED, WORKER_MODULES, ForkServer
from support.warm_drivers import Drivers, DriverServer

_SERVERS = pytest.StashKey["tuple[DriverServer, ForkServer]"]()
_DRIVERS, _WORKERS = "drivers_socket", "workers_socket"


def share_servers(node: Any) -> None:
    """Give a node of pytest-xdist the sockets of the servers, which start with the first node."""
    if _SERVERS not in node.config.stash:
        servers = DriverServer(), ForkServer()
        node.config.stash[_SERVERS] = servers
        for server in servers:
            node.config.add_cleanup(server.close)
    drivers, workers = node.config.stash[_SERVERS]
    node.workerinput |= {_DRIVERS: drivers.address, _WORKERS: workers.address}


@contextmanager
def open_drivers(config: pytest.Config) -> Iterator[Drivers]:
    """Use the shared server of drivers, or one of this process if it is no node of pytest-xdist."""
    shared = getattr(config, "workerinput", {})
    if _DRIVERS in shared:
        yield Drivers(shared[_DRIVERS])
        return
    server = DriverServer()
    yield server
    server.close()


@contextmanager
def open_workers(config: pytest.Config) -> Iterator[dict[str, str]]:
    """Return the environment of jobs whose workers are forks of the shared server, or of one of this process."""
    shared = getattr(config, "workerinput", {})
    if _WORKERS in shared:
        yield {ENVIRONMENT: shared[_WORKERS]}
        return
    more = ("tests.support.sglang_workers",) if is_installed("sglang") else ()
    server = ForkServer((*WORKER_MODULES, *IF_INSTALLED, *more))
    yield {ENVIRONMENT: server.address}
    server.close()
