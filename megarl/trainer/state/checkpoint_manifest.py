"""Manifest of a checkpoint: its files with sizes and checksums; the ID of its run; the retention over manifests.

``manifest.json`` lists every file with its size and BLAKE2b digest, and has a digest of itself. A missing, truncated,
altered or foreign file is named before anything of it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from megarl.base.errors import CheckpointError, ConfigError
from megarl.base.files import DIGEST_BYTES, FileEntry, flush_file, flush_path, read_entry
from megarl.base.json_text import parse_json

MANIFEST = "manifest.json"
FORMAT = 1
HASH_THREADS = 8  # hashing and fsync release the interpreter lock
_FOREIGN = re.compile(r"\.nfs[0-9a-f]+|\.DS_Store|\._.+|Thumbs\.db|desktop\.ini|\.directory|\.fuse_hidden[0-9a-f]+")
NO_ENTRIES: Mapping[str, FileEntry] = {}
ID_FILE = "run_id"
"""File with the ID, in each folder that a run writes."""
_ID_LETTERS = 20


logger = logging.getLogger(__name__)


class Score(NamedTuple):
    """Validation metric of the weights in a checkpoint."""

    metric: str
    value: float


@dataclass(frozen=True)
class Manifest:
    """Contents of one complete checkpoint."""

    step: int
    """Global step after which it was saved."""
    sequence: int
    """Position among the saves into the same root, from 1: orders the saves of runs that share a folder."""
    files: dict[str, FileEntry]
    """By path relative to the folder, with ``/`` as separator."""
    score: Score | None = None
    """Selects the best checkpoint; None without a validation."""


def write_manifest(
    folder: Path,
    step: int,
    sequence: int,
    entries: Mapping[str, FileEntry] = NO_ENTRIES,
    score: Score | None = None,
) -> Manifest:
    """Flush every file below the folder to disk, and write and flush its manifest.

    Args:
        entries: of files that their writers have already flushed and hashed; only their sizes are checked.

    Raises:
        OSError: reading, flushing or writing failed.
        CheckpointError: the folder holds a link or a device, or a file of ``entries`` is missing or has another size.
    """
    manifest = Manifest(step, sequence, {**entries, **_read_entries(folder, flush=True, but=entries)}, score)
    if entries:
        problems = list(_layout_problems(folder, manifest))
        if problems:
            raise CheckpointError(
                f"checkpoint {folder} differs from the files that were written: {'; '.join(problems)}",
                code="checkpoint.changed-while-saved",
            )
    return write_document(folder, manifest)


def write_document(folder: Path, manifest: Manifest) -> Manifest:
    """Write ``manifest.json`` for existing files, and flush it and all folders.

    Raises:
        OSError: writing failed.
    """
    files = {name: list(manifest.files[name]) for name in sorted(manifest.files)}
    score = {} if manifest.score is None else {"score": list(manifest.score)}
    document = {"format": FORMAT, "step": manifest.step, "sequence": manifest.sequence, **score, "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**document, "digest": _document_digest(document)}, file, indent=1)
        file.flush()
        flush_file(file.fileno())
    for parent, _, _ in os.walk(folder):
        flush_path(Path(parent))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder without checking its files.

    Raises:
        CheckpointError: the manifest is missing, malformed, of another format, or fails its own checksum.
    """
    path = folder / MANIFEST
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the folder is no checkpoint, or its save never finished",
            code="checkpoint.no-manifest",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", code="checkpoint.unreadable-file") from None
    try:
        if document["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: format={document['format']!r}, this megarl reads {FORMAT}",
                code="checkpoint.other-format",
            )
        digest = document.pop("digest")
        files = {str(name): FileEntry(int(size), str(digest)) for name, (size, digest) in document["files"].items()}
        score = document.get("score")
        score = None if score is None else Score(str(score[0]), float(score[1]))
        manifest = Manifest(int(document["step"]), int(document["sequence"]), files, score)
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}", code="checkpoint.malformed-manifest") from None
    if digest != _document_digest(document):
        raise CheckpointError(
            f"{path} fails its own checksum: it was altered or is damaged", code="checkpoint.corrupt-manifest"
        )
    return manifest


def verify_files(folder: Path) -> Manifest:
    """Compare every file below the folder with the manifest, including contents.

    Raises:
        CheckpointError: names each file that is missing, has another size or content, or is not in the manifest.
    """
    manifest = read_manifest(folder)
    try:
        problems = list(_layout_problems(folder, manifest))
        # Contents are read only if the list of files is right, so a truncated shard is reported at once.
        if not problems:
            entries = _read_entries(folder, flush=False)
            problems = [
                f"{name}: content differs from its checksum"
                for name, entry in manifest.files.items()
                if entries.get(name) != entry
            ]
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: {error}", code="checkpoint.unreadable-file"
        ) from error
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"checkpoint {folder} is corrupt: {shown}", code="checkpoint.corrupt-file")
    return manifest


def is_whole(folder: Path) -> bool:
    """Return whether all files exist with their sizes; does not read contents."""
    try:
        return not list(_layout_problems(folder, read_manifest(folder)))
    except (CheckpointError, OSError):
        return False


def identify_run(resumed: Path | None = None) -> str:
    """Return the ID of a run: that of the checkpoint folder to resume from, or a new one.

    The run's folder, checkpoints and exports have its ID. A run replaces and removes those of its own ID only, so it
    never destroys another run's work.
    """
    earlier = None if resumed is None else read_run_id(resumed)
    return earlier or uuid4().hex[:_ID_LETTERS]


def read_run_id(folder: Path) -> str | None:
    """Read the ID of the run that wrote a folder; None without one."""
    try:
        return (folder / ID_FILE).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def is_of_another_run(folder: Path, run_id: str | None) -> bool:
    """Return whether a run with another ID saved a checkpoint.

    A damaged checkpoint, or one with a damaged ID, has no owner.
    """
    if not is_whole(folder) or read_run_id(folder) == run_id:
        return False
    try:
        entry = read_manifest(folder).files.get(ID_FILE)
        return entry is None or read_entry(folder / ID_FILE, flush=False) == entry
    except (CheckpointError, OSError):
        return False


def _document_digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _layout_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    sizes = {name: os.lstat(folder / name).st_size for name in _file_names(folder)}
    for name, entry in manifest.files.items():
        if name not in sizes:
            yield f"{name} is missing"
        elif sizes[name] != entry.size:
            yield f"{name} has {sizes[name]} bytes, {entry.size} were saved"
    for name in sorted(sizes.keys() - manifest.files.keys()):
        yield f"{name} is not part of the checkpoint"


def _file_names(folder: Path) -> list[str]:
    """Sorted names of all files below a folder, without the manifest and files of file systems and desktops."""
    names = []
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in files + folders):
            mode = os.lstat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(
                    f"checkpoint {folder}: {path.relative_to(folder)} is a link or device, not a file",
                    code="checkpoint.link-or-device",
                )
            if stat.S_ISREG(mode):
                names.append(path.relative_to(folder).as_posix())
    foreign = [name for name in names if _is_foreign(name)]
    if foreign:
        _warn_once(f"checkpoint {folder}: ignored, not written by megarl: {', '.join(foreign)}")
    return sorted(name for name in names if name != MANIFEST and not _is_foreign(name))


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _is_foreign(name: str) -> bool:
    """Return whether a file belongs to a file system (``.nfs...``) or desktop (``.DS_Store``), not to a checkpoint."""
    return _FOREIGN.fullmatch(name.rpartition("/")[2]) is not None


def _read_entries(folder: Path, flush: bool, but: Mapping[str, FileEntry] = NO_ENTRIES) -> dict[str, FileEntry]:
    names = [name for name in _file_names(folder) if name not in but]
    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        entries = pool.map(lambda name: read_entry(folder / name, flush), names)
        return dict(zip(names, entries, strict=True))


class BestBy(NamedTuple):
    """Metric that selects the best checkpoint.

    Attributes:
        mode: ``max`` or ``min``.
    """

    metric: str
    mode: str = "max"

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether a value beats another value, or None; NaN beats nothing."""
        if math.isnan(value):
            return False
        return than is None or (value > than if self.mode == "max" else value < than)


class Removal(NamedTuple):
    """Parts of a checkpoint to remove.

    Attributes:
        roles: folders to remove; None = the whole checkpoint.
    """

    step: int
    roles: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Retention:
    """How many checkpoints to keep.

    A checkpoint loses each role that has enough newer checkpoints, and is removed without any role. The best checkpoint
    keeps all roles.

    Args:
        limits: number of the newest checkpoints to keep, by role; None = all.
        best: selects the best checkpoint, which is kept at any age; None = no best checkpoint.

    Raises:
        ConfigError: a limit is below 1.
    """

    limits: Mapping[str, int | None] = field(default_factory=dict)
    best: BestBy | None = None

    def __post_init__(self) -> None:
        for role, limit in self.limits.items():
            if limit is not None and limit < 1:
                raise ConfigError(
                    f"{limit_key(role)}={limit}, expected at least 1, or null to keep all",
                    code="config.value-out-of-limits",
                )

    def best_of(self, manifests: Iterable[Manifest]) -> Manifest | None:
        """Select the best checkpoint, the newest of equal ones; None if none has a score."""
        best: Manifest | None = None
        for manifest in sorted(manifests, key=lambda manifest: manifest.sequence, reverse=True):
            score = self._score(manifest)
            if score is not None and self.best is not None:
                best_score = None if best is None else self._score(best)
                if self.best.is_better(score.value, None if best_score is None else best_score.value):
                    best = manifest
        return best

    def removals(self, manifests: Sequence[Manifest]) -> list[Removal]:
        """List the parts to remove from complete checkpoints, the oldest first."""
        best = self.best_of(manifests)
        removals = []
        kept = dict.fromkeys(self.limits, 0)
        for manifest in sorted(manifests, key=lambda manifest: manifest.sequence, reverse=True):
            present = [role for role in self.limits if role in roles_in(manifest)]
            surplus = []
            for role in present:
                limit = self.limits[role]
                kept[role] += 1
                if limit is not None and kept[role] > limit:
                    surplus.append(role)
            if surplus and manifest is not best:
                removals.append(Removal(manifest.step, None if surplus == present else tuple(surplus)))
        return removals[::-1]

    def _score(self, manifest: Manifest) -> Score | None:
        if self.best is None or manifest.score is None or manifest.score.metric != self.best.metric:
            return None
        return None if math.isnan(manifest.score.value) else manifest.score


def limit_key(role: str) -> str:
    """Name the configuration key that limits the checkpoints of a role."""
    return f"trainer.max_{role}_ckpt_to_keep" if role in ("actor", "critic") else "trainer.max_ckpt_to_keep"


def roles_in(manifest: Manifest) -> set[str]:
    """List the roles of a checkpoint: its folders."""
    return {name.split("/")[0] for name in manifest.files if "/" in name}
