"""A light worker class for the saver's tests, which writes when the test allows it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.base.files import read_entry
from megarl.workers.dispatch import Dispatch, SavedPart, WorkerPlace, verb


class SlowSaver:
    """Writes one file per rank once the file ``<control>/go`` is there, and fails where ``<control>/full`` is.

    Args:
        place: of this process.
        control: folder by which the test commands.
    """

    def __init__(self, place: WorkerPlace, *, control: str) -> None:
        self.rank = place.rank
        self.control = Path(control)
        self.failure = ""

    @verb(Dispatch.ALL)
    def save_checkpoint(self, path: str, contents: Sequence[str], in_background: bool) -> None:
        self.folder = Path(path)
        self.folder.mkdir(exist_ok=True)
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()
        if not in_background:
            self.thread.join()

    def _write(self) -> None:
        self.failure = ""
        with (self.folder / f"shard_{self.rank}").open("wb") as file:
            file.write(b"half")
            file.flush()
            while not (self.control / "go").exists():
                time.sleep(0.01)
            if self.rank == 1 and (self.control / "full").exists():
                self.failure = "OSError: [Errno 28] No space left on device"
            file.write(b"whole")

    @verb(Dispatch.ALL)
    def checkpoint_written(self) -> bool:
        return not self.thread.is_alive()

    @verb(Dispatch.ALL)
    def finish_checkpoint(self) -> SavedPart:
        self.thread.join()
        if self.failure:
            return SavedPart(failure=self.failure)
        name = f"shard_{self.rank}"
        return SavedPart({name: read_entry(self.folder / name)}, 1.5)

    @verb(Dispatch.ALL)
    def process(self) -> int:
        return os.getpid()
