"""Subprocesses that receive Ctrl-C in tests."""

from __future__ import annotations

import signal


def restore_interrupts() -> None:
    """Restore the default action of SIGINT, for ``preexec_fn``.

    Background jobs of a shell ignore SIGINT, and their children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
