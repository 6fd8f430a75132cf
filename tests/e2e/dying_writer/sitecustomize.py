"""Kills a process in the middle of writing a file; imported by every Python process with this folder in PYTHONPATH.

The process that opens a file whose path ends with ``MEGARL_E2E_DIE_WRITING`` is killed after it has written 20 tensors,
more than the buffer of the file holds.
"""

import itertools
import os
import signal
import sys


def _die_after_some_tensors() -> None:
    import torch

    real, calls = torch.save, itertools.count(1)

    def save(*args, **kwargs):  # type: ignore[no-untyped-def]
        real(*args, **kwargs)
        if next(calls) == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


def _watch(event, args):  # type: ignore[no-untyped-def]
    if event == "open" and str(args[0]).endswith(_ENDING) and isinstance(args[2], int) and args[2] & os.O_WRONLY:
        _die_after_some_tensors()


_ENDING = os.environ.get("MEGARL_E2E_DIE_WRITING", "")
if _ENDING:
    sys.addaudithook(_watch)
