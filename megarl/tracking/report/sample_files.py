"""The answers that a run keeps for its report: ``<step>.jsonl`` files that never outgrow their folder's limit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER_BYTES = 512 << 20


def write_samples(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write one sample per line; what is not JSON is written as its text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(sample, ensure_ascii=False, default=str) for sample in samples)
    # a lone surrogate, which a model's broken output may hold, cannot be written
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="replace")


def step_files(folder: Path | None) -> list[Path]:
    """The files ``<step>.jsonl`` of a folder, in the order of their steps; none where there is no folder."""
    found = folder.glob("*.jsonl") if folder is not None and folder.is_dir() else ()
    return sorted((path for path in found if path.stem.isdigit()), key=lambda path: int(path.stem))


def begin_samples(folder: Path, resumed_step: int | None) -> None:
    """Make room for a run's answers in a folder that another run, or the same one before, may have used.

    Args:
        folder: of the answers of all kinds.
        resumed_step: None for a run that starts anew: the older answers are moved to ``<name>.old``. A number for a run
            that continues after that step: answers of later steps are deleted, since they will be given again.
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
    """Answers of a run, by step.

    When the files together reach the limit, every second step's are deleted, and from then on those of fewer steps are
    kept, evenly spread; the first step's and the latest's always are.

    Args:
        folder: of the files; made when the first is written.
        limit_bytes: of all files together.
    """

    def __init__(self, folder: Path, limit_bytes: int = FOLDER_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.stride = 1
        files = step_files(folder)
        self._sizes = {int(path.stem): path.stat().st_size for path in files}

    def add(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write a step's answers."""
        write_samples(self._path(step), samples)
        before = max((kept for kept in self._sizes if kept < step), default=None)
        self._sizes[step] = self._path(step).stat().st_size
        if before is not None:
            self._drop([before])
        while sum(self._sizes.values()) > self.limit_bytes and len(self._sizes) > 2:
            self.stride *= 2
            self._drop(list(self._sizes))

    def _drop(self, steps: Iterable[int]) -> None:
        ends = (min(self._sizes), max(self._sizes))
        for step in steps:
            if step % self.stride and step not in ends:
                self._path(step).unlink(missing_ok=True)
                del self._sizes[step]

    def _path(self, step: int) -> Path:
        return self.folder / f"{step}.jsonl"
