"""Disks and folders: room and speed where checkpoints go, models and data that must be readable."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megarl.amounts import GIB, MIB
from megarl.doctor.node.finding import Finding, Status
from megarl.doctor.node.needs import Needs

SAMPLE_BYTES = 64 * MIB
SLOW_BYTES_PER_S = 100e6
LONG_SAVE_S = 600.0


class DiskSpeed(NamedTuple):
    """Bytes per second."""

    write: float
    read: float


def check_checkpoint_room(needs: Needs) -> list[Finding]:
    """Whether the folder of checkpoints can be written to and holds two of them: the old one goes after the new."""
    name, folder = "checkpoint folder", needs.checkpoint_dir
    if folder is None:
        return []
    try:
        existing = nearest_folder(Path(folder))
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
    except OSError as error:
        remedy = "name a folder that this user may write to: trainer.default_local_dir"
        return [Finding(name, Status.FAIL, f"{folder}: {error.strerror or error}", remedy)]
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if needs.checkpoint_bytes is None:
        return [Finding(name, Status.PASS if free > GIB else Status.WARN, found, "" if free > GIB else _ROOM)]
    wanted = 2 * needs.checkpoint_bytes
    found += f"; a checkpoint has about {needs.checkpoint_bytes / GIB:.2f} GiB, and two are there for a while"
    if free >= wanted:
        return [Finding(name, Status.PASS, found)]
    return [Finding(name, Status.FAIL if free < needs.checkpoint_bytes else Status.WARN, found, _ROOM)]


_ROOM = (
    "free room, name another folder by trainer.default_local_dir, or keep fewer (trainer.max_actor_ckpt_to_keep; of a "
    "supervised job trainer.max_ckpt_to_keep)"
)


def check_disk_speed(needs: Needs) -> list[Finding]:
    """Speed of the disk under the folder of checkpoints, by a file of 64 MiB that is written, flushed and read."""
    if needs.quick:
        return []
    name, folder = "disk speed", Path(needs.checkpoint_dir or ".")
    try:
        speed = disk_speed(nearest_folder(folder))
    except OSError as error:
        return [Finding(name, Status.FAIL, f"{folder}: {error.strerror or error}", _ROOM)]
    found = f"{speed.write / 1e6:.0f} MB/s written, {speed.read / 1e6:.0f} MB/s read at {folder}"
    remedy = "save to a local or parallel file system (trainer.default_local_dir), or less often (trainer.save_freq)"
    slow = speed.write < SLOW_BYTES_PER_S
    if needs.checkpoint_bytes is not None:
        seconds = needs.checkpoint_bytes / needs.nodes / speed.write
        slow = seconds > LONG_SAVE_S
        found += f"; a node's part of a checkpoint takes about {seconds:.0f} s"
    return [Finding(name, Status.WARN if slow else Status.PASS, found, remedy if slow else "")]


def disk_speed(folder: Path, size: int = SAMPLE_BYTES) -> DiskSpeed:
    """Speed of a file in a folder; what the machine keeps of it in memory is dropped before it is read.

    Raises:
        OSError: it cannot be written, as where the disk is full.
    """
    block = os.urandom(MIB)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megarl-doctor-") as file:
        begin = time.perf_counter()
        for _ in range(size // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(MIB):
            pass
        read = time.perf_counter()
    return DiskSpeed(size / (written - begin), size / (read - written))


def check_folders(needs: Needs) -> list[Finding]:
    """Whether models and data can be read here, byte by byte where that matters: each node reads its own part."""
    findings = [_readable("model", Path(path), _model_problem) for path in needs.models]
    findings += [_readable("data", Path(path), _path_problem) for path in needs.readable]
    return [*findings, *_hugging_face_cache()]


def _readable(kind: str, path: Path, problem_of: Callable[[Path], str | None]) -> Finding:
    problem = problem_of(path)
    if problem is None:
        return Finding(kind, Status.PASS, f"{path} can be read")
    remedy = "put it on a file system that all nodes see under this path, readable for this user"
    return Finding(kind, Status.FAIL, problem, remedy)


def _model_problem(path: Path) -> str | None:
    problem = _path_problem(path)
    if problem is None and not (path / "config.json").is_file():
        return f"{path}: has no config.json"
    return problem


def _path_problem(path: Path) -> str | None:
    """Why a file, or what is in a folder, cannot be read."""
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not file.is_dir():
                with open(file, "rb") as opened:
                    opened.read(1)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return None


def _hugging_face_cache() -> list[Finding]:
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    problem = None
    try:
        if not cache.exists() and "HF_HOME" not in os.environ:
            return []
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            os.listdir(cache)
    except OSError as error:
        problem = f"{cache}: {error.strerror or error}"
    if problem is None:
        return [Finding("Hugging Face cache", Status.PASS, f"{cache} can be read and written")]
    return [Finding("Hugging Face cache", Status.WARN, problem, "set HF_HOME to a folder that this user may write to")]


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists.

    Raises:
        NotADirectoryError: there is a file in the way.
    """
    for candidate in (path.absolute(), *path.absolute().parents):
        if candidate.is_dir():
            return candidate
        if candidate.exists():
            raise NotADirectoryError(f"{candidate} is a file")
    raise FileNotFoundError(f"{path}: no folder above it exists")
