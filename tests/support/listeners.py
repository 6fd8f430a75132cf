"""Listening TCP sockets of processes, by the kernel's tables."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable

import psutil

from megarl.base.processes import READ_ERRORS, command_line


def listening_processes(processes: Iterable[psutil.Process]) -> set[tuple[str, str]]:
    """Command line and listening address of each process that listens."""
    listeners = set()
    for process in processes:
        with contextlib.suppress(*READ_ERRORS):  # it has ended
            command = command_line(process)
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    listeners.add((command, connection.laddr.ip))
    return listeners


def assert_on_loopback(listeners: Iterable[tuple[str, str]], *commands: str) -> None:
    """Check that these commands listen, which shows that the tables were read, and that other machines reach none."""
    listeners = set(listeners)
    for command in commands:
        assert any(command in listening for listening, _ in listeners), (command, listeners)
    assert not [(command, ip) for command, ip in listeners if not _is_loopback(ip)]


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
