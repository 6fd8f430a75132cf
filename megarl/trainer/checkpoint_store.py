"""Where a run keeps its checkpoints: whole or not there, the newest good one found again.

::

    <root>/global_step_<N>/{actor/, critic/, trainer_state.json, ..., manifest.json}
    <root>/latest_checkpointed_iteration.txt      the step to continue from

A save is written into a hidden folder, flushed, described by its manifest, and only then renamed into place; the
pointer follows by a rename of its own. Killed at any moment, a save leaves the earlier checkpoints and a pointer to one
of them. One run at a time saves into a root.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.errors import CheckpointError, ConfigError
from megarl.trainer.checkpoint_manifest import (
    flush_directory,
    flush_file,
    is_whole,
    read_manifest,
    verify_files,
    write_manifest,
)

POINTER = "latest_checkpointed_iteration.txt"
RESUME_MODES = ("auto", "disable", "resume_path")
_FOLDER = re.compile(r"global_step_(\d+)")
_UNFINISHED = re.compile(r"\.(?:global_step_\d+|latest_checkpointed_iteration\.txt)\.tmp-(\d+)(?:-replaced)?")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: folder of the checkpoints, made at the first save.
        keep: how many of the newest to keep; None keeps all.

    Raises:
        ConfigError: ``keep`` is below 1.
    """

    def __init__(self, root: str | Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"trainer.max_ckpt_to_keep={keep}, expected at least 1, or null to keep all")
        self.root = Path(root).absolute()  # workers have working folders of their own
        self.keep = keep

    def begin(self, step: int) -> Path:
        """An empty folder for a save, into which driver and workers write; removes what dead runs left unfinished.

        Raises:
            CheckpointError: the folder cannot be made.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            folder = self._unfinished(step)
            folder.mkdir()
        except OSError as error:
            raise CheckpointError(f"no checkpoint of step {step} can be written to {self.root}: {error}") from error
        return folder

    def commit(self, step: int) -> Path:
        """Makes the folder of :meth:`begin` the newest checkpoint, points to it, and removes those beyond ``keep``.

        Returns:
            The finished folder ``<root>/global_step_<step>``.

        Raises:
            CheckpointError: the save failed, for want of space for example; the earlier checkpoints are as they were
                and the unfinished one is gone.
        """
        unfinished, folder = self._unfinished(step), self.root / f"global_step_{step}"
        if not unfinished.is_dir():
            raise CheckpointError(f"checkpoint of step {step} was not begun: {unfinished} does not exist")
        try:
            write_manifest(unfinished, step, 1 + max(self._sequences().values(), default=0))
            _put_in_place(unfinished, folder)
            flush_directory(self.root)
            self._point_to(step)
        except (OSError, CheckpointError) as error:
            self.abort(step)
            raise CheckpointError(
                f"saving the checkpoint of step {step} to {self.root} failed: {error}; earlier checkpoints are kept"
            ) from error
        self._remove_outdated()
        return folder

    def abort(self, step: int) -> None:
        """Removes the unfinished folder of a step; never raises."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)
        with suppress(OSError):
            self._unfinished_pointer().unlink()

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """:meth:`begin`, then :meth:`commit`, or :meth:`abort` where the body raises.

        Raises:
            CheckpointError: as both do, and where the body raises an OSError.
        """
        folder = self.begin(step)
        try:
            yield folder
        except OSError as error:
            self.abort(step)
            raise CheckpointError(
                f"saving the checkpoint of step {step} to {self.root} failed: {error}; earlier checkpoints are kept"
            ) from error
        except BaseException:
            self.abort(step)
            raise
        self.commit(step)

    def resolve(self, resume_mode: str, resume_from_path: str | Path | None = None) -> Path | None:
        """The verified checkpoint to continue from.

        Args:
            resume_mode: ``auto``: the one that the pointer names, else (with a warning) the newest complete one;
                ``disable``: none; ``resume_path``: ``resume_from_path``.
            resume_from_path: a ``global_step_<N>`` folder.

        Returns:
            The folder, or None to start at step 0: on ``disable``, or on ``auto`` where nothing was ever saved.

        Raises:
            CheckpointError: the named one is not complete; or on ``auto`` something was saved but nothing is complete:
                a run never starts anew in silence.
            ConfigError: unknown mode, or ``resume_path`` without a path.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            if not resume_from_path:
                raise ConfigError("trainer.resume_from_path must be set with trainer.resume_mode=resume_path")
            self.verify(resume_from_path)
            return Path(resume_from_path).absolute()
        if resume_mode == "auto":
            return self._newest()
        raise ConfigError(f"trainer.resume_mode={resume_mode!r}, expected one of: {', '.join(RESUME_MODES)}")

    def verify(self, path: str | Path) -> None:
        """Reads a checkpoint whole and compares it with its manifest.

        Raises:
            CheckpointError: names the folder and each file that is missing, altered, or not part of it.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint {folder} does not exist or is not a folder")
        manifest = verify_files(folder)
        named = _FOLDER.fullmatch(folder.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"checkpoint {folder} holds step {manifest.step}: it was renamed")

    def steps(self) -> list[int]:
        """Steps of the folders in the root, complete or not, in ascending order."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _newest(self) -> Path | None:
        steps, pointer = self.steps(), self.root / POINTER
        if not steps and not pointer.exists():
            return None
        complaints = []
        pointed = self._read_pointer()
        if isinstance(pointed, str):
            complaints.append(f"{pointer}: {pointed}")
        elif pointed not in steps:
            complaints.append(f"{pointer} names step {pointed}, but {self.root}/global_step_{pointed} does not exist")
        sequences = self._sequences()
        by_age = sorted(steps, key=lambda step: (step == pointed, sequences.get(step, 0), step), reverse=True)
        for step in by_age:
            folder = self.root / f"global_step_{step}"
            try:
                self.verify(folder)
            except CheckpointError as error:
                complaints.append(str(error))
                continue
            if complaints:
                logger.warning("Continuing from %s, because: %s", folder, "; ".join(complaints))
            return folder
        raise CheckpointError(
            f"nothing to continue from in {self.root}: {'; '.join(complaints)}. "
            "To start at step 0 all the same, set trainer.resume_mode=disable"
        )

    def _read_pointer(self) -> int | str:
        """The step that the pointer names, or what is wrong with it."""
        try:
            text = (self.root / POINTER).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"cannot be read ({error})"
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else f"holds {text[:40]!r}, expected a step number"

    def _point_to(self, step: int) -> None:
        unfinished = self._unfinished_pointer()
        with open(unfinished, "w", encoding="ascii") as file:
            file.write(f"{step}\n")
            file.flush()
            flush_file(file.fileno())
        os.replace(unfinished, self.root / POINTER)
        flush_directory(self.root)

    def _sequences(self) -> dict[int, int]:
        """When each readable checkpoint was saved, as a count of saves, by step."""
        found = {}
        for step in self.steps():
            try:
                found[step] = read_manifest(self.root / f"global_step_{step}").sequence
            except CheckpointError:
                continue
        return found

    def _remove_outdated(self) -> None:
        """Damaged folders count as nothing: they neither push out a good checkpoint nor are they removed."""
        if self.keep is None:
            return
        sequences = self._sequences()
        whole = [step for step in sequences if is_whole(self.root / f"global_step_{step}")]
        for step in sorted(whole, key=lambda step: sequences[step], reverse=True)[self.keep :]:
            doomed = self._unfinished(step)
            try:
                # Hidden first: a reader never sees a folder that is half removed.
                os.rename(self.root / f"global_step_{step}", doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                logger.warning("The outdated checkpoint of step %d could not be removed: %s", step, error)

    def _remove_leftovers(self) -> None:
        for entry in self.root.iterdir():
            match = _UNFINISHED.fullmatch(entry.name)
            # A process number of ours is an earlier save of this run, or of a dead one that had the same number.
            if not match or (int(match[1]) != os.getpid() and _is_alive(int(match[1]))):
                continue
            logger.warning("Removing %s, which an interrupted save left behind", entry)
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _unfinished(self, step: int) -> Path:
        return self.root / f".global_step_{step}.tmp-{os.getpid()}"

    def _unfinished_pointer(self) -> Path:
        return self.root / f".{POINTER}.tmp-{os.getpid()}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _put_in_place(unfinished: Path, folder: Path) -> None:
    """Renames, replacing what an earlier run saved for the same step without a moment in which neither is there."""
    if not folder.exists():
        os.rename(unfinished, folder)
    elif _exchange(unfinished, folder):
        shutil.rmtree(unfinished, ignore_errors=True)
    else:
        # This file system cannot exchange two names. Only a kill between the two renames would lose the earlier save.
        replaced = unfinished.with_name(f"{unfinished.name}-replaced")
        os.rename(folder, replaced)
        os.rename(unfinished, folder)
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names at once where kernel, C library and file system can; False where one cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if renameat2(*arguments) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(second))
