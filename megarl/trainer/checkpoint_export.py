"""The Hugging Face exports of a checkpoint, made of its own files while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from megarl.convert.conversion import Options, convert
from megarl.convert.open import open_source
from megarl.convert.source import HUGGING_FACE
from megarl.errors import CheckpointError, MegarlError
from megarl.replacing import put_in_place

HF_FOLDER = "huggingface"
WORKERS = 2


class BackgroundExport:
    """Converts what the workers of some roles have written; begins at once.

    Reads the files again, in small bands, and so needs neither the workers nor memory for the model.

    Args:
        folders: of the roles, in a save that is not yet complete.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._failure: Exception | None = None
        # A daemon: a process that has to end does not wait for it, and the unfinished save is never taken for one.
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            CheckpointError: an export failed, for want of space for example.
        """
        self._thread.join()
        if self._failure is not None:
            reason = f"{type(self._failure).__name__}: " if not isinstance(self._failure, MegarlError) else ""
            raise CheckpointError(f"the Hugging Face export failed: {reason}{self._failure}") from self._failure

    def _run(self) -> None:
        try:
            for folder in self._folders:
                # Config and tokenizer are read from the folder whose place the export takes.
                fresh = folder / f"{HF_FOLDER}.export"
                convert(open_source(folder), fresh, HUGGING_FACE, Options(workers=WORKERS, show_progress=False))
                put_in_place(fresh, folder / HF_FOLDER)
        except Exception as error:  # told by `wait`
            self._failure = error
