"""What a person sees while bytes move: a bar with the rate and the time left, or nothing where no terminal is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.convert.transfer import Report


@contextlib.contextmanager
def progress(title: str, total: int, done: int = 0, show: bool = True) -> Iterator[Report]:
    """Scope with a progress bar on the terminal's error stream.

    Args:
        title: what happens.
        total: bytes in all.
        done: bytes done before.
        show: draw the bar.

    Yields:
        To be called with the number of bytes done, from any thread.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda count: bar.advance(task, count)
