"""One conversion, from an opened source to a finished folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.convert.output import OutputPlan, plan_hugging_face, plan_role
from megarl.convert.progress import progress
from megarl.convert.selection import select
from megarl.convert.source import HUGGING_FACE, MEGARL, Source
from megarl.convert.transfer import transfer
from megarl.convert.unfinished import Unfinished
from megarl.errors import CheckpointError
from megarl.models.companions import copy_companions

SPARE_BYTES = 64 << 20
"""What must stay free on the disk."""
_PLANS = {HUGGING_FACE: plan_hugging_face, MEGARL: plan_role}


@dataclass(frozen=True)
class Options:
    """How to write an output."""

    dtype: torch.dtype | None = None
    """None keeps each tensor's own."""
    keep_value_head: bool = True
    max_shard_bytes: int = 5 * 10**9
    workers: int = 4
    overwrite: bool = False
    restart: bool = False
    show_progress: bool = True
    """Draw a progress bar, where a terminal is."""


@dataclass(frozen=True)
class Outcome:
    """What a conversion did."""

    tensors: int
    nbytes: int
    files: int
    reused: int
    """Files that an interrupted conversion had finished."""


def convert(source: Source, destination: Path, kind: str, options: Options) -> Outcome:
    """Converts a checkpoint.

    Args:
        source: where from.
        destination: folder to make. It appears when all of it is written and on the disk, and not before.
        kind: ``Hugging Face`` or ``megarl``.
        options: how.

    Raises:
        CheckpointError: the source has no head or is damaged, the destination exists, the disk has too little room,
            or what an interrupted conversion left is of something else.
    """
    _check_apart(source, destination)
    if source.lacks:
        raise CheckpointError(
            f"{source.path} lacks {' and '.join(source.lacks)}, without which no engine starts from it; inspect and "
            f"verify read it as it is"
        )
    selection = select(source, options.dtype, options.keep_value_head)
    if kind == MEGARL and selection.config["architectures"][0].endswith("Model"):
        raise CheckpointError(f"{source.path} has no output layer besides its scalar head, which must be kept")
    plan = _PLANS[kind](selection, options.max_shard_bytes)
    unfinished = Unfinished(destination, overwrite=options.overwrite)
    with unfinished.opened(_fingerprint(source, kind, options), options.restart):
        files = [file for file in plan.files if file.name not in unfinished.finished]
        _check_room(unfinished.folder, sum(file.size for file in files))
        left = sum(band.nbytes for file in files for band in file.bands)
        total = sum(band.nbytes for file in plan.files for band in file.bands)
        with progress(f"writing {destination.name}", total, total - left, options.show_progress) as report:
            transfer(files, unfinished.folder, options.workers, unfinished.record, report)
        _write_small(unfinished.folder, plan, source)
        unfinished.publish()
    return Outcome(len(selection.tensors), plan.nbytes, len(plan.files), len(plan.files) - len(files))


def _write_small(folder: Path, plan: OutputPlan, source: Source) -> None:
    companions = folder / plan.companions
    companions.mkdir(exist_ok=True)
    copy_companions(source.companions, companions)
    for name, content in plan.small.items():
        (folder / name).write_bytes(content)


def _check_apart(source: Source, destination: Path) -> None:
    """Refuses to write over what is being read."""
    place = destination.resolve()
    for path in (source.path.resolve(), source.companions.resolve()):
        if place == path or place in path.parents:
            raise CheckpointError(f"{destination} holds the source, {path}: choose another place")


def _check_room(folder: Path, needed: int) -> None:
    written = sum(
        file.stat().st_blocks * 512 for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp")
    )
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB more are needed"
            + (f" (besides {written / 1e9:.1f} GB that an interrupted conversion finished)" if written else "")
        )


def _fingerprint(source: Source, kind: str, options: Options) -> dict[str, object]:
    """What the bytes of the output depend on."""
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
