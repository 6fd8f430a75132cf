"""A save on its way: written by this thread or by one of its own, and ended by all ranks together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.errors import CheckpointError
from megarl.files import FileEntry, read_entry
from megarl.megatron.checkpoint_format import INDEX, ItemWriter
from megarl.megatron.runtime import Runtime
from megarl.megatron.together import together


class WrittenFiles(NamedTuple):
    """What one rank wrote.

    Attributes:
        entries: its files by path relative to the folder of the save.
        seconds: from the beginning of the writing to its end, digests included.
    """

    entries: dict[str, FileEntry]
    seconds: float


class PendingSave:
    """Writes at once: in a thread, which never communicates, or in the constructor.

    Args:
        runtime: this rank's place.
        folder: of the save, shared by all ranks.
        writer: of the tensors, planned; None where there are none.
        files: names of what this rank has written already.
        in_background: write in a thread; what the writer reads must then stay as it is.
    """

    def __init__(
        self, runtime: Runtime, folder: Path, writer: ItemWriter | None, files: Iterable[str], *, in_background: bool
    ) -> None:
        self._runtime = runtime
        self._folder = folder
        self._writer = writer
        self._files = set(files)
        self._entries: dict[str, FileEntry] = {}
        self._failure: Exception | None = None
        self._seconds = 0.0
        self._thread: threading.Thread | None = None
        if in_background:
            # A daemon: a process that has to end does not wait for it, and the unfinished save is never taken for one.
            self._thread = threading.Thread(target=self._write, name=f"save {folder.name}", daemon=True)
            self._thread.start()
        else:
            self._write()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is over, well or not; asks nobody."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> WrittenFiles:
        """Waits for the writing and makes the save readable; communicates.

        Raises:
            CheckpointError: on every rank, if any of them failed to write; says which and why.
        """
        if self._thread is not None:
            self._thread.join()
        doing = f"saving to {self._folder}"
        together(self._runtime, self._raise_failure, doing)
        if self._writer is not None:
            self._writer.finish()
            if self._runtime.rank == 0:
                self._files.add(INDEX)
        together(self._runtime, self._note_entries, doing)
        return WrittenFiles(self._entries, self._seconds)

    def _write(self) -> None:
        begin = time.perf_counter()
        try:
            if self._thread is not None and self._runtime.device.type == "cuda":
                torch.cuda.set_device(self._runtime.device)  # each thread has a current device of its own
            if self._writer is not None:
                self._files |= self._writer.write()
            self._note_entries()
        except Exception as error:  # told to every rank by `finish`
            self._failure = error
        self._seconds = time.perf_counter() - begin

    def _note_entries(self) -> None:
        """Sizes and digests of what is written and has none yet."""
        for name in sorted(self._files - self._entries.keys()):
            self._entries[name] = read_entry(self._folder / name, flush=True)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, CheckpointError):
            raise self._failure
        if self._failure is not None:
            raise CheckpointError(_reason(self._failure)) from self._failure


def _reason(error: BaseException) -> str:
    """What went wrong, with the error of the system that is behind an error of torch's."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        at = at.__cause__ or at.__context__
    return " <- ".join(f"{type(one).__name__}: {one}" for one in dict.fromkeys(seen))
