"""TCP ports that nobody uses."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

# Below the range from which systems take ports for outgoing connections, so that a port stays free between being
# chosen here and being bound by its user, and above those that Ray gives to its workers.
_PORTS: Sequence[int] = range(20000, 32768)


def reserve_port(host: str) -> socket.socket:
    """A socket bound to a free port of an address, not listening.

    Raises:
        OSError: none is found.
    """
    for port in random.SystemRandom().sample(_PORTS, 50):
        holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            holder.bind((host, port))
        except OSError:
            holder.close()
            continue
        return holder
    raise OSError(f"none of 50 ports tried in {_PORTS} is free on {host}")


def free_port(host: str = "") -> int:
    """A port of an address that is free now; "" stands for all addresses of this machine.

    Raises:
        OSError: none is found.
    """
    with reserve_port(host) as found:
        return int(found.getsockname()[1])
