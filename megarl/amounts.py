"""Numbers as users read them."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30


def some(number: int, what: str) -> str:
    """A count with its noun: ``1 node``, ``1,024 nodes``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def gib(nbytes: float) -> str:
    """Bytes as a number of GiB: one digit after the point, three where that would say little."""
    return f"{nbytes / GIB:,.1f}" if nbytes >= 0.05 * GIB else f"{nbytes / GIB:.3f}"
