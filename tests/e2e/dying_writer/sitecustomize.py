"""Kills or stops a process in a write of a file; imported by every Python process with this folder in PYTHONPATH.

The process that opens a file whose path ends with ``MEGARL_E2E_DIE_WRITING`` is killed after it has written 20 tensors,
more than the buffer of the file holds. The process that opens a file whose path matches the pattern
``MEGARL_E2E_HANG_WRITING`` creates the file ``MEGARL_E2E_HANGS`` and stands still.
"""

import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path


def _die_after_some_tensors() -> None:
    import torch

    real, calls = torch.save, itertools.count(1)

    def save(*args, **kwargs):  # type: ignore[no-untyped-def]
        real(*args, **kwargs)
        if next(calls) == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


def _watch(event, args):  # type: ignore[no-untyped-def]
    if event != "open" or not isinstance(args[2], int) or not args[2] & (os.O_WRONLY | os.O_RDWR):
        return
    if _ENDING and str(args[0]).endswith(_ENDING):
        _die_after_some_tensors()
    if _PATTERN and re.search(_PATTERN, str(args[0])):
        Path(os.environ["MEGARL_E2E_HANGS"]).touch()
        time.sleep(600)


_ENDING, _PATTERN = (os.environ.get(f"MEGARL_E2E_{name}_WRITING", "") for name in ("DIE", "HANG"))
if _ENDING or _PATTERN:
    sys.addaudithook(_watch)
