"""Lengths of rows in tokens: measured by several processes, and cached for large data sets; imports no torch."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megarl.data.rows import Rows
from megarl.data.rows.cache import digest
from megarl.data.tokenization import ConversationEncoder, PromptEncoder, PromptReader, ResponseEncoder

logger = logging.getLogger(__name__)

_CHUNK = 2048
ROWS_PER_WORKER = 16_384
"""Rows that justify a further process, which takes seconds to start."""
KEPT_ROWS = 4096
"""Lengths of smaller data sets are not cached but measured at each start."""
_LOG_EVERY_S = 30.0
IMAGE_COST = 64
"""Time to measure a prompt that may have images, relative to one of text only."""


class PromptLengths:
    """Measures the prompts of rows in tokens, and counts their images."""

    def __init__(self, encoder: PromptEncoder, reader: PromptReader) -> None:
        self.encoder = encoder
        self.reader = reader
        self.cost = 1 if reader.images is None else IMAGE_COST

    @property
    def identity(self) -> str:
        """Fingerprint of tokenizer, template and prompt columns."""
        return f"prompts and images|{self.encoder.identity}|{self.reader}"

    def content(self, rows: Rows, numbers: Sequence[int]) -> str:
        """Fingerprint of the files of images that the rows name."""
        images = self.reader.images
        return "" if images is None else images.identity(rows, numbers, self.reader.key)

    def __call__(self, rows: Rows, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Count the tokens and the images of each prompt."""
        locations = [rows.location(number) for number in numbers]
        values = rows.select(self.reader.columns, numbers)
        prompts = [
            self.reader.read(row, location, rows.folder(number))
            for number, row, location in zip(numbers, values, locations, strict=True)
        ]
        ids = self.encoder.encode_all(prompts, locations)
        return [(len(own), len(prompt.images)) for own, prompt in zip(ids, prompts, strict=True)]


class PairLengths:
    """Measures the prompts and the responses of rows in tokens."""

    cost = 1

    def __init__(self, encoder: PromptEncoder, reader: PromptReader, responses: ResponseEncoder) -> None:
        self.prompts = PromptLengths(encoder, reader)
        self.responses = responses

    @property
    def identity(self) -> str:
        """Fingerprint of tokenizer, template, prompt columns and response column."""
        return f"{self.prompts.identity}|responses|{self.responses.key}"

    def __call__(self, rows: Rows, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Count each prompt's and response's tokens."""
        locations = [rows.location(number) for number in numbers]
        responses = self.responses.encode(rows.select([self.responses.key], numbers), locations)
        prompts = self.prompts(rows, numbers)
        return [(prompt, len(response.ids)) for (prompt, _), response in zip(prompts, responses, strict=True)]


class ConversationLengths:
    """Measures conversations in tokens: before the first assistant message, and from it on."""

    cost = 1

    def __init__(self, encoder: ConversationEncoder) -> None:
        self.encoder = encoder

    @property
    def identity(self) -> str:
        """Fingerprint of everything except the rows that determines the counts."""
        return self.encoder.identity

    def __call__(self, rows: Rows, numbers: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Count the tokens of each conversation."""
        values = rows.select(self.encoder.reader.columns, numbers)
        encoded = [self.encoder.encode(row, rows.location(n)) for n, row in zip(numbers, values, strict=True)]
        return [(len(conversation.prompt), len(conversation.response.ids)) for conversation in encoded]


LengthMeasure = PromptLengths | PairLengths | ConversationLengths
"""Counts the tokens of rows; picklable."""


def measure_lengths(rows: Rows, numbers: np.ndarray, measure: LengthMeasure, workers: int | None = None) -> np.ndarray:
    """Measure rows, or load their lengths from the cache: ``[rows, counts]``.

    Args:
        numbers: of the rows, ascending.
        workers: processes; None = one per 16,384 rows, at most half of this process's cores.

    Raises:
        DataError: a row cannot be encoded; names it.
    """
    chosen: list[int] = numbers.tolist()
    if len(chosen) < KEPT_ROWS // measure.cost:
        return np.array(measure(rows, chosen), dtype=np.int32).reshape(len(chosen), 2)
    content = f"{rows.identity}|{measure.identity}|{digest(numbers.tobytes().hex())}"
    if isinstance(measure, PromptLengths):
        content += f"|{measure.content(rows, chosen)}"
    name = f"lengths-{digest('|'.join(map(os.path.abspath, rows.files)))}-{digest(measure.identity)}"

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, _measure(rows, chosen, measure, workers))

    lengths: np.ndarray = np.load(rows.cache.entry(name, content, ".npy", write))
    return lengths


def default_workers(rows: int) -> int:
    """Return the number of processes that pay off for this number of rows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // 2, rows // ROWS_PER_WORKER))


def _measure(rows: Rows, numbers: Sequence[int], measure: LengthMeasure, workers: int | None) -> np.ndarray:
    workers = workers or default_workers(len(numbers) * measure.cost)
    parts: list[np.ndarray] = []
    with progress_bar(len(numbers), "measuring rows") as advance:
        for part in _parts(rows, numbers, measure, workers):
            parts.append(part)
            advance(len(part))
    return np.concatenate(parts)


def _parts(rows: Rows, numbers: Sequence[int], measure: LengthMeasure, workers: int) -> Iterator[np.ndarray]:
    size = _CHUNK // measure.cost
    chunks = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    if workers == 1:
        for chunk in chunks:
            yield np.array(measure(rows, chunk), dtype=np.int32)
        return
    # spawned, not forked: a fork lacks the tokenizer's threads
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _init_process, (rows, measure)) as pool:
        try:
            yield from pool.map(_measure_chunk, chunks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_work: tuple[Rows, LengthMeasure] | None = None
"""Rows and measure of a measuring process."""


def _init_process(rows: Rows, measure: LengthMeasure) -> None:
    global _work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
    _work = rows, measure


def _measure_chunk(numbers: Sequence[int]) -> np.ndarray:
    assert _work is not None
    rows, measure = _work
    return np.array(measure(rows, numbers), dtype=np.int32)


@contextmanager
def progress_bar(total: int, description: str) -> Iterator[Callable[[int], None]]:
    """Show progress: a bar on a terminal, otherwise a log line every 30 s.

    Yields:
        A function that adds to the completed count.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    done, last_log = 0, time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)

        def advance(count: int) -> None:
            nonlocal done, last_log
            done += count
            bar.advance(task, count)
            if not console.is_terminal and time.monotonic() - last_log > _LOG_EVERY_S:
                last_log = time.monotonic()
                logger.info("%s: %d of %d", description, done, total)

        yield advance
