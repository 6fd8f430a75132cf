"""Conversion of a checkpoint into a folder that appears only when it is complete.

The output is written to a hidden folder next to its destination. A killed conversion leaves that folder. The next
conversion with the same source and options writes only the missing files; ``--restart`` discards them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.base.atomic_write import atomic_write_text, replace_folder, restore_replaced_folder
from megarl.base.errors import CheckpointError
from megarl.base.files import flush_path
from megarl.base.json_text import parse_json
from megarl.convert.output import OutputPlan, plan_adapters, plan_hugging_face, plan_role, progress, select, transfer
from megarl.convert.source import HUGGING_FACE, MEGARL, PEFT, CheckpointSource
from megarl.models.carried_tensors import is_multi_token, warn_of_missing_layers
from megarl.models.hf_folder import check_tower
from megarl.models.hf_writer import copy_companions

SPARE_BYTES = 64 << 20  # disk space that must stay free
_PLANS = {HUGGING_FACE: plan_hugging_face, MEGARL: plan_role}


@dataclass(frozen=True)
class ConversionOptions:
    """Options of an output."""

    dtype: torch.dtype | None = None  # dtype of the weights; None keeps the dtype of each tensor
    keep_value_head: bool = True
    max_shard_bytes: int = 5 * 10**9
    workers: int = 4
    overwrite: bool = False
    restart: bool = False
    show_progress: bool = True  # draw a progress bar on a terminal


@dataclass(frozen=True)
class ConversionResult:
    """Size of a finished conversion."""

    tensors: int
    nbytes: int
    files: int
    reused: int  # files that an interrupted conversion finished


def convert(source: CheckpointSource, destination: Path, kind: str, options: ConversionOptions) -> ConversionResult:
    """Convert a checkpoint.

    Args:
        destination: folder to create; it appears when all files are written and flushed to disk.
        kind: output format, ``Hugging Face``, ``megarl`` or ``peft``.

    Raises:
        CheckpointError: the source has no head or is damaged, the destination exists, the disk has too little space,
            or an interrupted conversion of another source is in the way.
    """
    _check_separate(source, destination)
    if source.lacks:
        raise CheckpointError(
            f"{source.path} lacks {' and '.join(source.lacks)}, which every engine needs; inspect and "
            f"verify can read it",
            code="convert.source-lacks-files",
        )
    plan = _planned(source, kind, options)
    if kind == HUGGING_FACE:
        _check_carried(source)
    unfinished = UnfinishedOutput(destination, overwrite=options.overwrite)
    with unfinished.opened(_fingerprint(source, kind, options), options.restart):
        files = [file for file in plan.files if file.name not in unfinished.finished]
        _check_disk_space(unfinished.folder, sum(file.size for file in files))
        remaining = sum(band.nbytes for file in files for band in file.bands)
        total = sum(band.nbytes for file in plan.files for band in file.bands)
        with progress(f"writing {destination.name}", total, total - remaining, options.show_progress) as report:
            transfer(files, unfinished.folder, options.workers, unfinished.record, report)
        _write_small(unfinished.folder, plan, source)
        unfinished.publish()
    return ConversionResult(plan.tensors, plan.nbytes, len(plan.files), len(plan.files) - len(files))


def _check_carried(source: CheckpointSource) -> None:
    """Require the vision tower, and warn without announced multi-token prediction layers."""
    config, folder = source.config, f"{source.initial or source.companions} (--model FOLDER names another)"
    check_tower(folder, config, source.carried)
    if not source.has_value_head and not any(is_multi_token(config, name) for name in source.carried):
        warn_of_missing_layers(config, folder)


def _planned(source: CheckpointSource, kind: str, options: ConversionOptions) -> OutputPlan:
    if kind == PEFT:
        if source.adapters is None:
            raise CheckpointError(f"{source.path} has no adapters: it was trained without LoRA; expected a checkpoint "
                                  "of a run with lora_rank above 0", code="convert.no-adapters")  # fmt: skip
        return plan_adapters(source.adapters, options.dtype)
    selection = select(source, options.dtype, options.keep_value_head)
    if kind == MEGARL and selection.config["architectures"][0].endswith("Model"):
        text = f"{source.path} has no output layer but its scalar head; omit --value-head strip"
        raise CheckpointError(text, code="convert.only-scalar-head")
    return _PLANS[kind](selection, options.max_shard_bytes)


def _write_small(folder: Path, plan: OutputPlan, source: CheckpointSource) -> None:
    companions = folder / plan.companions
    companions.mkdir(exist_ok=True)
    copy_companions(source.companions, companions)
    for name, content in plan.small.items():
        (folder / name).write_bytes(content)


def _check_separate(source: CheckpointSource, destination: Path) -> None:
    target = destination.resolve()
    for path in (source.path.resolve(), source.companions.resolve()):
        if target == path or target in path.parents:
            text = f"{destination} contains the source, {path}: choose another destination"
            raise CheckpointError(text, code="convert.overlapping-folders")


def _check_disk_space(folder: Path, needed: int) -> None:
    large = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp")]
    written = sum(file.stat().st_blocks * 512 for file in large)
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB more are needed"
            + (f" (in addition to {written / 1e9:.1f} GB of an interrupted conversion)" if written else "")
            + "; free some space or choose another destination",
            code="disk.no-space",
        )


def _fingerprint(source: CheckpointSource, kind: str, options: ConversionOptions) -> dict[str, object]:
    """Return everything that determines the bytes of the output."""
    stats = {str(file.absolute()): file.stat() for file in source.files()}
    return {
        "format": 1,
        "kind": kind,
        "dtype": options.dtype,
        "keep_value_head": options.keep_value_head,
        "max_shard_bytes": options.max_shard_bytes,
        "config": source.config.raw,
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


_JOURNAL = "conversion.json"
_LOCK = "conversion.lock"


class UnfinishedOutput:
    """An output folder while it is written; ``overwrite`` replaces an existing one.

    Raises:
        CheckpointError: ``path`` exists and may not be replaced, or its parent is not writable.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path.absolute()
        self.folder = self.path.parent / f".{self.path.name}.converting"
        self.finished: set[str] = set()
        self._fingerprint = ""
        self._writing = threading.Lock()
        restore_replaced_folder(self.path)
        if os.path.lexists(self.path) and not overwrite:
            text = f"{path} exists already; choose another destination, or pass --overwrite"
            raise CheckpointError(text, code="convert.destination-exists")

    @contextlib.contextmanager
    def opened(self, plan: Mapping[str, Any], restart: bool) -> Iterator[None]:
        """Hold the folder's lock, so that only this process writes it.

        Args:
            plan: everything that determines the bytes of the output; files of another plan are not reused.
            restart: discard the files of an interrupted conversion.

        Raises:
            CheckpointError: another process converts to the same path, or an interrupted conversion with another
                plan left files and ``restart`` is off.
        """
        self._fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / _LOCK).open("w", encoding="utf-8") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = f"another process is converting to {self.path}; wait for it or choose another destination"
                    raise CheckpointError(text, code="convert.in-progress") from None
                self._take_over(restart)
                yield
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder}: {error}", code="convert.write-failed") from error

    def record(self, name: str) -> None:
        """Record a file that is complete and flushed to disk."""
        with self._writing:
            self.finished.add(name)
            self._write_journal()

    def publish(self) -> None:
        """Flush the folder and rename it to its final path; an existing folder is replaced."""
        for name in (_JOURNAL, _LOCK):
            (self.folder / name).unlink(missing_ok=True)
        for folder, _, names in os.walk(self.folder):
            for name in names:
                flush_path(Path(folder) / name)
            flush_path(Path(folder))
        replace_folder(self.folder, self.path)

    def _take_over(self, restart: bool) -> None:
        journal = self._read_journal()
        if journal is not None and not restart and journal.get("plan") != self._fingerprint:
            raise CheckpointError(
                f"{self.folder} is left from an interrupted conversion of another source or with other options: "
                f"--restart discards it",
                code="convert.interrupted-other",
            )
        finished = [] if journal is None or restart else journal["finished"]
        self.finished = {name for name in finished if (self.folder / name).is_file()}
        for path in self.folder.iterdir():
            if path.name not in {*self.finished, _LOCK, _JOURNAL}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._write_journal()

    def _write_journal(self) -> None:
        content = json.dumps({"plan": self._fingerprint, "finished": sorted(self.finished)})
        atomic_write_text(self.folder / _JOURNAL, content)

    def _read_journal(self) -> dict[str, Any] | None:
        try:
            journal = parse_json((self.folder / _JOURNAL).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return journal if isinstance(journal, dict) and isinstance(journal.get("finished"), list) else None
