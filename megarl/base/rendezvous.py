"""Rendezvous stores of torch.distributed that listen on one address; torch's own listen on all interfaces.

A TCPStore has no password: a client that reaches its port may read, write and delete every key.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from megarl.base.errors import ResourceError

STORE_TIMEOUT = timedelta(seconds=60)


def host_store(host: str, port: int = 0, timeout: timedelta = STORE_TIMEOUT, world_size: int | None = None) -> TCPStore:
    """Start a TCPStore that listens on one address of this machine; it lives as long as the object.

    Args:
        port: 0 = a free one.
        world_size: number of processes, this one included, to wait for; None = return at once.

    Raises:
        ResourceError: this machine does not have the address, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise ResourceError(
            f"the rendezvous of the ranks cannot listen on {host}:{port} ({error}): the address must be one of this "
            "machine's and the port free",
            code="launch.rendezvous-address",
        ) from error
    port = listener.getsockname()[1]
    # The store owns the descriptor and closes it.
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=world_size is not None,
        master_listen_fd=listener.detach(),
    )


def join_rendezvous(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Meet the other ranks at a TCPStore on rank 0; returns once all have come.

    Under torchrun the store is that of its agent, which listens already.

    Args:
        host: address of rank 0.
        timeout: limit of the wait for the others, and of each later wait for a key.

    Raises:
        ResourceError: rank 0 cannot listen on the address.
        torch.distributed.DistStoreError: the others have not come in time.
    """
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return host_store(host, port, timeout, world_size)
    return TCPStore(host, port, world_size, is_master=False, timeout=timeout)
