"""Sample files of a run: ``<step>.jsonl`` files in a folder of limited size, for the report."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.base.json_text import format_json
from megarl.base.run_writer import RUN_WRITER

FOLDER_BYTES = 512 << 20


def write_samples(path: Path, samples: Iterable[Mapping[str, Any]]) -> int:
    """Write one sample per line; values that JSON lacks are written as strings. Returns the number of bytes."""
    lines = (format_json(sample, ensure_ascii=False, default=str) for sample in samples)
    # "replace": broken output of a model may contain lone surrogates, which UTF-8 cannot encode
    content = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
    RUN_WRITER.replace(path, content)
    return len(content)


def step_files(folder: Path | None) -> list[Path]:
    """Return the files ``<step>.jsonl`` of a folder, ordered by step; a missing folder has none."""
    paths = folder.glob("*.jsonl") if folder is not None and folder.is_dir() else ()
    return sorted((path for path in paths if path.stem.isdigit()), key=lambda path: int(path.stem))


def begin_samples(folder: Path, resumed_step: int | None) -> None:
    """Prepare the folder of a run's samples, which an earlier run may have used.

    Args:
        resumed_step: None for a new run: an existing folder is renamed to ``<name>.old``. The step of the checkpoint
            for a resumed run: samples of later steps, which will be written again, are deleted.
    """
    if resumed_step is None:
        if folder.exists():
            old = folder.with_name(folder.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        return
    for kind in folder.iterdir() if folder.is_dir() else ():
        for path in step_files(kind):
            if int(path.stem) > resumed_step:
                path.unlink()


class SampleFiles:
    """Samples of a run, one file per step.

    When the files reach the size limit, every second step is deleted, and from then on only every second step is kept.
    The first step and the latest step are always kept.
    """

    def __init__(self, folder: Path, limit_bytes: int = FOLDER_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.stride = 1
        files = step_files(folder)
        self._sizes = {int(path.stem): path.stat().st_size for path in files}

    def add(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write the samples of a step."""
        before = max((kept for kept in self._sizes if kept < step), default=None)
        self._sizes[step] = write_samples(self._path(step), samples)
        if before is not None:
            self._drop([before])
        while sum(self._sizes.values()) > self.limit_bytes and len(self._sizes) > 2:
            self.stride *= 2
            self._drop(list(self._sizes))

    def _drop(self, steps: Iterable[int]) -> None:
        ends = (min(self._sizes), max(self._sizes))
        for step in steps:
            if step % self.stride and step not in ends:
                RUN_WRITER.forget(self._path(step))
                with suppress(OSError):
                    self._path(step).unlink(missing_ok=True)
                del self._sizes[step]

    def _path(self, step: int) -> Path:
        return self.folder / f"{step}.jsonl"
