"""Worker groups whose ranks are called by node, as in a large group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.cluster import node_caller
from megarl.cluster.resources import PlacedPool


@contextmanager
def calls_by_node(ranks_per_node: int) -> Iterator[None]:
    """Have the ranks of groups that are built in this block called by node, as if each node had this many."""
    node = PlacedPool.node

    def numbered(pool: PlacedPool, rank: int) -> str | None:
        """Return one of the node's names: Ray reads hexadecimal digits of both cases."""
        name, number = node(pool, rank), rank // ranks_per_node
        letters = [place for place, digit in enumerate(name or "") if digit.isalpha()]
        upper = {place for bit, place in enumerate(letters) if number >> bit & 1}
        return name and "".join(digit.upper() if place in upper else digit for place, digit in enumerate(name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_caller, "FEWEST_RANKS", 2)
        patch.setattr(PlacedPool, "node", numbered)
        yield
