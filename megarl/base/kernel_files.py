"""Reads of files below ``/proc``, which Linux may deliver empty once although their process lives."""

from __future__ import annotations

import time
from pathlib import Path

ATTEMPTS = 10
PAUSE_S = 0.01
"""Number of reads of a file that is empty, and the seconds between them."""


def read_kernel_file(path: str) -> str:
    """Read a file below ``/proc`` as text; empty if it does not exist or may not be read.

    A thread that a signal interrupts can read zero bytes of a complete file, so an empty file is read again.
    """
    try:
        for _ in range(ATTEMPTS):
            text = Path(path).read_text(errors="replace")
            if text:
                return text
            time.sleep(PAUSE_S)
    except OSError:
        pass
    return ""
