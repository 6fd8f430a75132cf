"""Moves bands from a source to the files of an output, in parallel, in as little memory as a few bands take."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from megarl.convert.output import Band, FilePlan
from megarl.convert.stored import Files, Scratch
from megarl.errors import CheckpointError

_T = TypeVar("_T")
Report = Callable[[int], None]
"""Called with the number of bytes done, from any thread."""


def in_parallel(work: Callable[[_T, Scratch], None], items: Iterable[_T], workers: int) -> None:
    """Calls ``work`` for every item, in order of their beginning; after an error no other is begun, and it is raised.

    Args:
        work: gets an item and its worker's memory.
        items: taken one by one, when a worker is free.
        workers: number of threads; reading, writing and copying release the interpreter lock.
    """
    iterator, lock, stop = iter(items), threading.Lock(), threading.Event()

    def loop() -> None:
        scratch = Scratch()
        torch.set_num_threads(1)
        while not stop.is_set():
            with lock:
                item = next(iterator, iterator)
            if item is iterator:
                return
            try:
                work(item, scratch)  # type: ignore[arg-type]  # not the sentinel
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures = [pool.submit(loop) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()


class _OpenFile:
    """An output file until all its bands are written."""

    def __init__(self, path: Path, plan: FilePlan) -> None:
        self.plan, self._left, self._lock = plan, len(plan.bands), threading.Lock()
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self.descriptor, plan.size)
        for offset, content in plan.fixed:
            _write(self.descriptor, memoryview(content), offset)

    def band_done(self) -> bool:
        """Notes a band; whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def finish(self) -> None:
        """Makes the file survive a power failure."""
        try:
            os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


def transfer(
    files: Iterable[FilePlan], folder: Path, workers: int, finished: Callable[[str], None], report: Report
) -> None:
    """Writes files.

    Args:
        files: what to write.
        folder: where.
        workers: number of threads.
        finished: called with a file's name once it is whole and on the disk.
        report: told of the bytes written.

    Raises:
        CheckpointError: something of the source is missing or damaged, or writing failed: the disk may be full.
    """
    sources = Files()

    def bands() -> Iterator[tuple[_OpenFile, Band]]:
        for plan in files:
            opened = _OpenFile(folder / plan.name, plan)
            for band in plan.bands:
                yield opened, band

    def move(item: tuple[_OpenFile, Band], scratch: Scratch) -> None:
        opened, band = item
        rows = band.view.read(band.first, band.last, band.dtype, sources, scratch)
        _write(opened.descriptor, rows.view(-1).view(torch.uint8).numpy().data, band.offset)
        report(band.nbytes)
        if opened.band_done():
            opened.finish()
            finished(opened.plan.name)

    try:
        in_parallel(move, bands(), workers)
    except OSError as error:
        raise CheckpointError(f"writing to {folder} failed: {error}") from error
    finally:
        sources.close()


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count
