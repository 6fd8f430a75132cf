"""Processes that tests press Ctrl-C on."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """For ``preexec_fn``: a shell starts what runs in its background deaf to SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
