"""The list of what a checkpoint folder holds, and the check that it still holds exactly that.

``manifest.json`` names every file with its size and BLAKE2b digest and carries a digest of itself, so that a missing,
truncated, altered or foreign file is found and named before anything of it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megarl.errors import CheckpointError
from megarl.files import DIGEST_BYTES, FileEntry, flush_file, flush_path, read_entry

MANIFEST = "manifest.json"
FORMAT = 1
HASH_THREADS = 8  # hashing and fsync release the interpreter lock
NO_ENTRIES: Mapping[str, FileEntry] = {}


class Score(NamedTuple):
    """What a validation said of the weights in a checkpoint."""

    metric: str
    value: float


@dataclass(frozen=True)
class Manifest:
    """What one complete checkpoint holds."""

    step: int
    """The global step after which it was saved."""
    sequence: int
    """Position among the saves into the same root, from 1: tells the newer of two runs that share a folder."""
    files: dict[str, FileEntry]
    """By path relative to the folder, with ``/`` between its parts."""
    score: Score | None = None
    """By which the best checkpoint is told; None where there was no validation."""


def write_manifest(
    folder: Path,
    step: int,
    sequence: int,
    known: Mapping[str, FileEntry] = NO_ENTRIES,
    score: Score | None = None,
) -> Manifest:
    """Flushes every file below the folder to disk and writes its manifest, itself flushed.

    Args:
        folder: of the checkpoint.
        step: see :class:`Manifest`.
        sequence: see :class:`Manifest`.
        known: files that whoever wrote them has flushed and read already; of those only the size is looked at.
        score: see :class:`Manifest`.

    Raises:
        OSError: reading, flushing or writing failed.
        CheckpointError: the folder holds a link or another thing that is not a plain file, or a known file is missing
            or has another size.
    """
    manifest = Manifest(step, sequence, {**known, **_read_entries(folder, flush=True, but=known)}, score)
    if known:
        problems = list(_layout_problems(folder, manifest))
        if problems:
            raise CheckpointError(f"checkpoint {folder} is not what was written: {'; '.join(problems)}")
    return write_document(folder, manifest)


def write_document(folder: Path, manifest: Manifest) -> Manifest:
    """Writes ``manifest.json`` of files that are there already, and flushes it and all folders.

    Raises:
        OSError: writing failed.
    """
    document = _document(manifest)
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**document, "digest": _document_digest(document)}, file, indent=1)
        file.flush()
        flush_file(file.fileno())
    for parent, _, _ in os.walk(folder):
        flush_path(Path(parent))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, whose files are not looked at.

    Raises:
        CheckpointError: it is missing, malformed, of another format, or fails its own checksum.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: not a checkpoint folder, or one that was never finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        if document["format"] != FORMAT:
            raise CheckpointError(f"{path}: format={document['format']!r}, this megarl reads {FORMAT}")
        digest = document.pop("digest")
        files = {str(name): FileEntry(int(size), str(found)) for name, (size, found) in document["files"].items()}
        score = document.get("score")
        score = None if score is None else Score(str(score[0]), float(score[1]))
        manifest = Manifest(int(document["step"]), int(document["sequence"]), files, score)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}") from None
    if digest != _document_digest(document):
        raise CheckpointError(f"{path} fails its own checksum: it was altered or is damaged")
    return manifest


def verify_files(folder: Path) -> Manifest:
    """Compares every file below the folder with its manifest.

    Raises:
        CheckpointError: names each file that is missing, of another size or content, or not in the manifest.
    """
    manifest = read_manifest(folder)
    try:
        problems = list(_layout_problems(folder, manifest))
        # Contents are read only where the list of files is right: a truncated shard is reported at once.
        if not problems:
            found = _read_entries(folder, flush=False)
            problems = [
                f"{name}: content differs from its checksum"
                for name, entry in manifest.files.items()
                if found.get(name) != entry
            ]
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"checkpoint {folder} is corrupt: {shown}")
    return manifest


def is_whole(folder: Path) -> bool:
    """Whether all files are there with their sizes; a cheap look that reads no contents."""
    try:
        return not list(_layout_problems(folder, read_manifest(folder)))
    except (CheckpointError, OSError):
        return False


def _document(manifest: Manifest) -> dict[str, Any]:
    files = {name: list(manifest.files[name]) for name in sorted(manifest.files)}
    score = {} if manifest.score is None else {"score": list(manifest.score)}
    return {"format": FORMAT, "step": manifest.step, "sequence": manifest.sequence, **score, "files": files}


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
    """Sorted names of all files below a folder but the manifest's own."""
    names = []
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in files + folders):
            mode = os.lstat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(
                    f"checkpoint {folder}: {path.relative_to(folder)} is a link or device, not a file"
                )
            if stat.S_ISREG(mode):
                names.append(path.relative_to(folder).as_posix())
    return sorted(name for name in names if name != MANIFEST)


def _read_entries(folder: Path, flush: bool, but: Mapping[str, FileEntry] = NO_ENTRIES) -> dict[str, FileEntry]:
    names = [name for name in _file_names(folder) if name not in but]
    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        entries = pool.map(lambda name: read_entry(folder / name, flush), names)
        return dict(zip(names, entries, strict=True))
