"""Ports that no other test process takes between their choice and their use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.base.ports import reserve_port


@contextmanager
def held_port(host: str = "") -> Iterator[int]:
    """Hold a free port within the block: other searches skip it, and one server can listen there.

    The server must set ``SO_REUSEADDR``, as the stores of torch.distributed and :func:`socket.create_server` do.
    """
    with reserve_port(host) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind, which had to be exclusive
        yield int(reserved.getsockname()[1])
