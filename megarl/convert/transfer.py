"""Parallel copy of bands from a checkpoint to the files of an output, in the memory of a few bands."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.base.errors import CheckpointError
from megarl.convert.output import Band, FilePlan
from megarl.convert.stored import Files, Scratch

_T = TypeVar("_T")
Report = Callable[[int], None]  # called with the number of bytes done, from any thread


def in_parallel(work: Callable[[_T, Scratch], None], items: Iterable[_T], workers: int) -> None:
    """Call ``work`` for every item, started in order; the first error stops further items and is raised.

    Args:
        work: receives an item and its worker's scratch memory.
        items: taken one at a time, whenever a worker is free.
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
        """Count a written band; return whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def finish(self) -> None:
        """Flush the file to disk and close it."""
        try:
            os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


def transfer(
    files: Iterable[FilePlan], folder: Path, workers: int, finished: Callable[[str], None], report: Report
) -> None:
    """Write files.

    Args:
        finished: called with the name of each file that is complete and flushed to disk.
        report: called with the number of bytes written.

    Raises:
        CheckpointError: a part of the source is missing or damaged, or writing failed, for example on a full disk.
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
        raise CheckpointError(f"writing to {folder} failed: {error}", code="convert.write-failed") from error
    finally:
        sources.close()


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count


@contextlib.contextmanager
def progress(title: str, total: int, done: int = 0, show: bool = True) -> Iterator[Report]:
    """Show a progress bar on stderr, if it is a terminal.

    Args:
        total: total bytes.
        done: bytes done before.

    Yields:
        A function that adds a number of bytes, from any thread.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda count: bar.advance(task, count)
