"""Read by every Python process whose PYTHONPATH has this folder: one of them dies in the middle of a file.

The process that opens a file whose path ends like ``MEGARL_E2E_DIE_WRITING`` for writing is killed when it has written
some of the file's tensors, more than the file's buffer holds.
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
