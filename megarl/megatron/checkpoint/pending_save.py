"""A save in progress: written immediately, or by a thread from a host memory snapshot; and the Hugging Face export."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.base.checkpoint_files import HF_FOLDER
from megarl.base.errors import CheckpointError
from megarl.base.files import FileEntry, read_entry
from megarl.megatron.checkpoint.storage import INDEX, Item, ItemWriter
from megarl.megatron.engine.megatron_engine import MegatronEngine
from megarl.megatron.runtime.memory import HostBuffer
from megarl.megatron.runtime.process_groups import Runtime, all_ranks_or_raise


class WrittenFiles(NamedTuple):
    """Files that one rank wrote, by path relative to the save's folder, and the seconds, digests included."""

    entries: dict[str, FileEntry]
    seconds: float


class PendingSave:
    """Writes immediately: in a thread, which never communicates, or in the constructor.

    Args:
        writer: planned writer of the tensors; None if there are none.
        files: names of files that this rank has already written.
        in_background: write in a thread; the writer's tensors must not change until then.
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
            # A daemon: the process can end without it, and an unfinished save is never taken for a complete one.
            self._thread = threading.Thread(target=self._write, name=f"save {folder.name}", daemon=True)
            self._thread.start()
        else:
            self._write()

    @property
    def is_written(self) -> bool:
        """Whether this rank has finished writing, successfully or not; does not communicate."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> WrittenFiles:
        """Wait for the writing and complete the save; communicates.

        Raises:
            CheckpointError: on every rank, if any of them failed to write; names rank and reason.
        """
        if self._thread is not None:
            self._thread.join()
        doing = f"saving to {self._folder}"
        self._runtime.barrier.wait_for_all()  # ranks write at different speeds
        all_ranks_or_raise(self._runtime, self._raise_failure, doing)
        if self._writer is not None:
            self._writer.finish()
            if self._runtime.rank == 0:
                self._files.add(INDEX)
        all_ranks_or_raise(self._runtime, self._note_entries, doing)
        return WrittenFiles(self._entries, self._seconds)

    def _write(self) -> None:
        begin = time.perf_counter()
        try:
            if self._thread is not None and self._runtime.device.type == "cuda":
                torch.cuda.set_device(self._runtime.device)  # the current device is per thread
            if self._writer is not None:
                self._files |= self._writer.write()
            self._note_entries()
        except Exception as error:  # finish() raises it on every rank
            self._failure = error
        self._seconds = time.perf_counter() - begin

    def _note_entries(self) -> None:
        for name in sorted(self._files - self._entries.keys()):
            self._entries[name] = read_entry(self._folder / name, flush=True)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, CheckpointError):
            raise self._failure
        if self._failure is not None:
            raise CheckpointError(_reason(self._failure), code="checkpoint.rank-failed") from self._failure


def _reason(error: BaseException | None) -> str:
    """Reason of a failure, with the system error that caused an error of torch's."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return " <- ".join(f"{type(cause).__name__}: {cause}" for cause in seen)


class HostSnapshot:
    """A copy of the state in host memory, so that training continues while a thread writes; reused by later saves.

    Only one save is in progress at a time, so one such memory is enough.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = HostBuffer(device)

    def take(self, items: Sequence[Item]) -> list[Item]:
        """Copy items that are on the device, not offloaded ones; the copies are valid until the next call."""
        resident = [item for item in items if not item.memory.is_offloaded]
        data = [item.memory.joined().view(torch.uint8) for item in resident]
        offsets = self._buffer.write(data)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        copied = [item for item in items if item.memory.is_offloaded]
        for item, offset, source in zip(resident, offsets, data, strict=True):
            pieces = self._buffer.pieces(offset, len(source))
            memory = item.memory._replace(pieces=tuple(piece.view(item.memory.dtype) for piece in pieces))
            copied.append(item._replace(memory=memory))
        return copied


def export_beside(
    engine: MegatronEngine, folder: Path, copy_from: str | Path | None, files: Mapping[str, str]
) -> set[str]:
    """Export the model to ``<folder>/huggingface``; communicates.

    Returns:
        Names of the files, relative to ``folder``, on the rank that wrote them.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write.
    """
    failure: Exception | None = None
    try:
        engine.export_hf(folder / HF_FOLDER, copy_from, files=files)
    except Exception as error:  # raised on every rank below, once all have noticed
        failure = error

    def list_files() -> set[str]:
        if failure is not None:
            raise failure
        if engine.runtime.rank != 0:
            return set()
        paths = (folder / HF_FOLDER).rglob("*")
        return {path.relative_to(folder).as_posix() for path in paths if path.is_file()}

    return all_ranks_or_raise(engine.runtime, list_files, f"exporting to {folder / HF_FOLDER}")
