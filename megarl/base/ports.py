"""Free TCP ports, the network interface that collectives listen on, and proxies."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Iterator, Sequence

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface of gloo, read when a group is created."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

# Below the ephemeral range of outgoing connections, so that a port stays free until its user binds it, and above the
# ports of Ray's workers.
_PORTS: Sequence[int] = range(20000, 32768)


def reserve_port(host: str) -> socket.socket:
    """Bind a socket to a free port of an address, without listening; searches skip the port while it is open.

    One server with ``SO_REUSEADDR``, such as a rendezvous store, can listen there meanwhile.

    Raises:
        OSError: no free port was found.
    """
    for port in random.SystemRandom().sample(_PORTS, 50):
        candidate = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            candidate.bind((host, port))
        except OSError:
            candidate.close()
            continue
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which had to be exclusive
        return candidate
    raise OSError(f"none of 50 ports tried in {_PORTS} is free on {host}")


@contextlib.contextmanager
def held_port(host: str = "") -> Iterator[int]:
    """Reserve a free port within the block, in which a server starts to listen; see :func:`reserve_port`.

    Args:
        host: address; "" = all addresses of this machine.

    Raises:
        OSError: no free port was found.
    """
    with reserve_port(host) as reserved:
        yield int(reserved.getsockname()[1])


def free_port(host: str = "") -> int:
    """Return a port that is free now, for a user that cannot share it with :func:`held_port`.

    Raises:
        OSError: no free port was found.
    """
    with held_port(host) as port:
        return port


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address; None if this machine has none with it."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            return str(name)
    return None


def collective_interfaces(address: str) -> dict[str, str]:
    """Return environment variables that make gloo, and NCCL on loopback, listen on the interface of an address.

    Gloo would take the address of the host name, and NCCL the first interface of the machine. Between nodes NCCL
    chooses, since it may use several interfaces.

    Args:
        address: this node's address in the job; loopback if all ranks are on this machine.
    """
    is_local = ipaddress.ip_address(address).is_loopback
    # The loopback interface has all addresses of 127.0.0.0/8, and names one.
    name = interface_of("127.0.0.1" if is_local and ":" not in address else address)
    if name is None:
        return {}
    return dict.fromkeys((GLOO_INTERFACE, *(["NCCL_SOCKET_IFNAME"] if is_local else [])), name)


def bypass_proxies(*hosts: str) -> None:
    """Let HTTP clients of this process and its children reach loopback addresses and ``hosts`` without a proxy.

    Without a proxy in the environment, nothing changes.
    """
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return
    entries = [entry for name in ("no_proxy", "NO_PROXY") for entry in os.environ.get(name, "").split(",")]
    direct = ",".join(dict.fromkeys(entry.strip() for entry in (*entries, *_LOOPBACK, *hosts) if entry.strip()))
    os.environ.update(no_proxy=direct, NO_PROXY=direct)
