"""Ports that no other test process takes between their choice and their use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megarl.base.ports import reserve_port


@contextmanager
def held_port(host: str = "") -> Iterator[int]:
    """Hold a free port within the block; a rendezvous store or :func:`socket.create_server` can listen there."""
    with reserve_port(host) as reserved:
        yield int(reserved.getsockname()[1])
