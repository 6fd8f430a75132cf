"""Checks of storage: space and speed of the checkpoint folder, readable model and data files."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from megarl.base.files import WRITABLE, nearest_folder, write_error
from megarl.base.formatting import GIB, MIB
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status

SAMPLE_BYTES = 64 * MIB
SLOW_BYTES_PER_S = 100e6
LONG_SAVE_S = 600.0


def check_checkpoint_room(needs: Needs) -> list[CheckResult]:
    """Check that the checkpoint folder is writable and has space for two checkpoints, old and new."""
    name, folder = "checkpoint folder", needs.checkpoint_dir
    if folder is None:
        return []
    if problem := write_error(Path(folder)):
        return [CheckResult(name, Status.FAIL, f"{folder}: {problem}", f"{WRITABLE}: trainer.default_local_dir")]
    free = shutil.disk_usage(nearest_folder(Path(folder))).free
    observation = f"{free / GIB:.1f} GiB free at {folder}"
    if needs.checkpoint_bytes is None:
        return [CheckResult(name, Status.PASS if free > GIB else Status.WARN, observation, "" if free > GIB else _ROOM)]
    needed = 2 * needs.checkpoint_bytes
    observation += f"; a checkpoint has about {needs.checkpoint_bytes / GIB:.2f} GiB, and two exist for a while"
    if free >= needed:
        return [CheckResult(name, Status.PASS, observation)]
    return [CheckResult(name, Status.FAIL if free < needs.checkpoint_bytes else Status.WARN, observation, _ROOM)]


_ROOM = (
    "free space, set another folder by trainer.default_local_dir, or keep fewer (trainer.max_actor_ckpt_to_keep; in a "
    "supervised job trainer.max_ckpt_to_keep)"
)


def check_disk_speed(needs: Needs) -> list[CheckResult]:
    """Measure the disk of the checkpoint folder with a file of 64 MiB: write, flush, read."""
    if needs.quick:
        return []
    name, folder = "disk speed", Path(needs.checkpoint_dir or ".")
    try:
        written, read = disk_speed(nearest_folder(folder))
    except OSError as error:
        return [CheckResult(name, Status.FAIL, f"{folder}: {error.strerror or error}", _ROOM)]
    observation = f"{written / 1e6:.0f} MB/s written, {read / 1e6:.0f} MB/s read at {folder}"
    remedy = "save to a local or parallel file system (trainer.default_local_dir), or less often (trainer.save_freq)"
    slow = written < SLOW_BYTES_PER_S
    if needs.checkpoint_bytes is not None:
        seconds = needs.checkpoint_bytes / needs.trainer_nodes / written
        slow = seconds > LONG_SAVE_S
        observation += f"; a node's part of a checkpoint takes about {seconds:.0f} s"
    return [CheckResult(name, Status.WARN if slow else Status.PASS, observation, remedy if slow else "")]


def disk_speed(folder: Path) -> tuple[float, float]:
    """Return the write and read speeds of a temporary file, in bytes/s; the page cache is dropped before the read.

    Raises:
        OSError: the file cannot be written, for example on a full disk.
    """
    block = os.urandom(MIB)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megarl-doctor-") as file:
        begin = time.perf_counter()
        for _ in range(SAMPLE_BYTES // MIB):
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
    return SAMPLE_BYTES / (written - begin), SAMPLE_BYTES / (read - written)


def check_folders(needs: Needs) -> list[CheckResult]:
    """Check that model folders, data files and the Hugging Face cache are readable on this node."""
    results = [_readable("model", Path(path)) for path in needs.models]
    results += [_readable("data", Path(path)) for path in needs.readable]
    return [*results, *_hugging_face_cache()]


def _readable(kind: str, path: Path) -> CheckResult:
    problem = _path_problem(path)
    if problem is None and kind == "model" and not (path / "config.json").is_file():
        problem = f"{path}: has no config.json"
    if problem is None:
        return CheckResult(kind, Status.PASS, f"{path} can be read")
    remedy = "put it on a file system that all nodes mount at this path, readable for this user"
    return CheckResult(kind, Status.FAIL, problem, remedy)


def _path_problem(path: Path) -> str | None:
    """Describe why a file, or a file in a folder, cannot be read; None if all can."""
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not file.is_dir():
                with file.open("rb") as opened:
                    opened.read(1)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return None


def _hugging_face_cache() -> list[CheckResult]:
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    try:
        if not cache.exists() and "HF_HOME" not in os.environ:
            return []
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            os.listdir(cache)
    except OSError as error:
        problem, remedy = f"{cache}: {error.strerror or error}", "set HF_HOME to a folder that this user may write to"
        return [CheckResult("Hugging Face cache", Status.WARN, problem, remedy)]
    return [CheckResult("Hugging Face cache", Status.PASS, f"{cache} can be read and written")]
