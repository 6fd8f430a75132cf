"""Subprocesses that receive Ctrl-C in tests."""

from __future__ import annotations

import signal


def restore_interrupts() -> None:
    """Restore the default action of SIGINT and SIGHUP, for ``preexec_fn``.

    Background jobs of a shell ignore SIGINT, and those of ``nohup`` SIGHUP; their children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
