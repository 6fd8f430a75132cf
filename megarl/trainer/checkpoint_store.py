"""Where a run keeps its checkpoints: whole or not there, the newest good one found again.

::

    <root>/global_step_<N>/{actor/, critic/, trainer_state.json, ..., manifest.json}
    <root>/latest_checkpointed_iteration.txt      the step to continue from
    <root>/best_checkpointed_iteration.txt        the step with the best validation, where one is asked for

A save is written into a hidden folder, flushed, described by its manifest, and only then renamed into place; the
pointer follows by a rename of its own. Killed at any moment, a save leaves the earlier checkpoints and a pointer to one
of them. One run at a time saves into a root.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megarl.errors import CheckpointError, ConfigError
from megarl.files import FileEntry, flush_file, flush_path
from megarl.replacing import put_in_place, restore_replaced
from megarl.trainer.checkpoint_manifest import (
    NO_ENTRIES,
    Manifest,
    Score,
    is_whole,
    read_manifest,
    verify_files,
    write_document,
    write_manifest,
)
from megarl.trainer.checkpoint_retention import Retention, limit_key, roles_in

POINTER = "latest_checkpointed_iteration.txt"
BEST_POINTER = "best_checkpointed_iteration.txt"
RESUME_MODES = ("auto", "must", "disable", "resume_path")
_FOLDER = re.compile(r"global_step_(\d+)")
_UNFINISHED = re.compile(r"\.(?:global_step_\d+|(?:latest|best)_checkpointed_iteration\.txt)\.tmp-(\d+)")
_REPLACED = re.compile(r"\.(global_step_\d+)\.replaced")

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: folder of the checkpoints, made at the first save.
        retention: which of them to keep; by default all.
    """

    def __init__(self, root: str | Path, retention: Retention | None = None) -> None:
        self.root = Path(root).absolute()  # workers have working folders of their own
        self.retention = retention or Retention()

    def begin(self, step: int) -> Path:
        """An empty folder for a save, into which driver and workers write; removes what dead runs left unfinished.

        Raises:
            CheckpointError: the folder cannot be made.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._restore_replaced()
            self._remove_leftovers()
            folder = self.unfinished(step)
            folder.mkdir()
        except OSError as error:
            raise CheckpointError(f"no checkpoint of step {step} can be written to {self.root}: {error}") from error
        return folder

    def commit(self, step: int, known: Mapping[str, FileEntry] = NO_ENTRIES, score: Score | None = None) -> Path:
        """Makes the folder of :meth:`begin` the newest checkpoint, points to it, and removes what need not be kept.

        Args:
            step: that was begun.
            known: files that their writers have flushed and read; they are not read again here.
            score: what validation said of these weights.

        Returns:
            The finished folder ``<root>/global_step_<step>``.

        Raises:
            CheckpointError: the save failed, for want of space for example; the earlier checkpoints are as they were
                and the unfinished one is gone.
        """
        unfinished, folder = self.unfinished(step), self.root / f"global_step_{step}"
        if not unfinished.is_dir():
            raise CheckpointError(f"checkpoint of step {step} was not begun: {unfinished} does not exist")
        try:
            sequence = 1 + max((manifest.sequence for manifest in self._manifests()), default=0)
            write_manifest(unfinished, step, sequence, known, score)
            put_in_place(unfinished, folder)
            self._point_to(step, POINTER)
        except (OSError, CheckpointError) as error:
            self.abort(step)
            raise self._failure(step, error) from error
        self._tidy_up()
        return folder

    def abort(self, step: int) -> None:
        """Removes the unfinished folder of a step; never raises."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)
        with suppress(OSError):
            self._unfinished_pointer(POINTER).unlink()

    @contextmanager
    def saving(self, step: int, score: Score | None = None) -> Iterator[Path]:
        """:meth:`begin`, then :meth:`commit`, or :meth:`abort` where the body raises.

        Raises:
            CheckpointError: as both do, and where the body raises an OSError.
        """
        folder = self.begin(step)
        try:
            yield folder
        except OSError as error:
            self.abort(step)
            raise self._failure(step, error) from error
        except BaseException:
            self.abort(step)
            raise
        self.commit(step, score=score)

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"saving the checkpoint of step {step} to {self.root} failed: {error}; earlier checkpoints are kept"
        )

    def best(self) -> Manifest | None:
        """The best of the whole checkpoints by the retention's metric; None where none has it."""
        return self.retention.best_of(self._whole())

    def resolve(
        self, resume_mode: str, resume_from_path: str | Path | None = None, roles: Collection[str] = ()
    ) -> Path | None:
        """The verified checkpoint to continue from.

        Args:
            resume_mode: ``auto``: the one that the pointer names, else (with a warning) the newest complete one;
                ``must``: the same, and an error where there is none; ``disable``: none; ``resume_path``:
                ``resume_from_path``.
            resume_from_path: a ``global_step_<N>`` folder.
            roles: whose state it must hold.

        Returns:
            The folder, or None to start at step 0: on ``disable``, or on ``auto`` where nothing was ever saved.

        Raises:
            CheckpointError: the named one is not complete; or on ``auto`` something was saved but nothing is complete:
                a run never starts anew in silence; or on ``must`` nothing was ever saved.
            ConfigError: unknown mode, or ``resume_path`` without a path.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            if not resume_from_path:
                raise ConfigError("trainer.resume_from_path must be set with trainer.resume_mode=resume_path")
            self.verify(resume_from_path, roles)
            return Path(resume_from_path).absolute()
        if resume_mode in ("auto", "must"):
            found = self._newest(roles)
            if found is None and resume_mode == "must":
                raise CheckpointError(
                    f"trainer.resume_mode=must, but there is no checkpoint in {self.root}: check "
                    "trainer.default_local_dir, or begin a new run with trainer.resume_mode=auto"
                )
            return found
        raise ConfigError(f"trainer.resume_mode={resume_mode!r}, expected one of: {', '.join(RESUME_MODES)}")

    def verify(self, path: str | Path, roles: Collection[str] = ()) -> None:
        """Reads a checkpoint whole and compares it with its manifest.

        Args:
            path: its folder.
            roles: whose state it must hold.

        Raises:
            CheckpointError: names the folder and each file that is missing, altered, or not part of it; or the role
                that it does not hold.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint {folder} does not exist or is not a folder")
        manifest = verify_files(folder)
        named = _FOLDER.fullmatch(folder.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"checkpoint {folder} holds step {manifest.step}: it was renamed")
        missing = [role for role in roles if role not in roles_in(manifest)]
        if missing:
            raise CheckpointError(
                f"checkpoint {folder} holds no {' and no '.join(missing)}: it was saved without, or "
                f"{limit_key(missing[0])} removed it"
            )

    def steps(self) -> list[int]:
        """Steps of the folders in the root, complete or not, in ascending order."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _newest(self, roles: Collection[str]) -> Path | None:
        self._restore_replaced()
        steps, pointer = self.steps(), self.root / POINTER
        if not steps and not pointer.exists():
            return None
        complaints = []
        pointed = self._read_pointer()
        if isinstance(pointed, str):
            complaints.append(f"{pointer}: {pointed}")
        elif pointed not in steps:
            complaints.append(f"{pointer} names step {pointed}, but {self.root}/global_step_{pointed} does not exist")
        sequences = {manifest.step: manifest.sequence for manifest in self._manifests()}
        by_age = sorted(steps, key=lambda step: (step == pointed, sequences.get(step, 0), step), reverse=True)
        for step in by_age:
            folder = self.root / f"global_step_{step}"
            try:
                self.verify(folder, roles)
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

    def _point_to(self, step: int, pointer: str) -> None:
        unfinished = self._unfinished_pointer(pointer)
        with open(unfinished, "w", encoding="ascii") as file:
            file.write(f"{step}\n")
            file.flush()
            flush_file(file.fileno())
        os.replace(unfinished, self.root / pointer)
        flush_path(self.root)

    def _manifests(self) -> list[Manifest]:
        """Of the checkpoints whose manifest can be read; a folder that was renamed counts as what its name says."""
        found = []
        for step in self.steps():
            with suppress(CheckpointError):
                found.append(replace(read_manifest(self.root / f"global_step_{step}"), step=step))
        return found

    def _whole(self) -> list[Manifest]:
        return [one for one in self._manifests() if is_whole(self.root / f"global_step_{one.step}")]

    def _tidy_up(self) -> None:
        """Points to the best and removes what need not be kept; a failure is told and harms nothing.

        Damaged folders count as nothing: they neither push out a good checkpoint nor are they removed.
        """
        whole = self._whole()
        best = self.retention.best_of(whole)
        try:
            if best is not None:
                self._point_to(best.step, BEST_POINTER)
        except OSError as error:
            logger.warning("%s could not be written: %s", self.root / BEST_POINTER, error)
        for step, roles in self.retention.removals(whole):
            try:
                self._remove(step) if roles is None else self._thin_out(step, roles)
            except (OSError, CheckpointError) as error:
                what = "" if roles is None else f"{' and '.join(roles)} of "
                logger.warning("%sthe outdated checkpoint of step %d could not be removed: %s", what, step, error)

    def _remove(self, step: int) -> None:
        doomed = self.unfinished(step)
        # Hidden first: a reader never sees a folder that is half removed.
        os.rename(self.root / f"global_step_{step}", doomed)
        shutil.rmtree(doomed)

    def _thin_out(self, step: int, roles: Collection[str]) -> None:
        """Replaces a checkpoint by one without the files of some roles; a reader sees one or the other."""
        folder, thinner = self.root / f"global_step_{step}", self.unfinished(step)
        manifest = read_manifest(folder)
        kept = {name: entry for name, entry in manifest.files.items() if name.split("/")[0] not in roles}
        try:
            for name in kept:
                (thinner / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(folder / name, thinner / name)
            write_document(thinner, replace(manifest, files=kept))
            put_in_place(thinner, folder)
        finally:
            shutil.rmtree(thinner, ignore_errors=True)

    def _restore_replaced(self) -> None:
        """Undoes a replacement that was killed, where the file system cannot exchange two names."""
        for entry in self.root.iterdir() if self.root.is_dir() else ():
            match = _REPLACED.fullmatch(entry.name)
            if match and restore_replaced(self.root / match[1]):
                logger.warning("Brought back %s, which a killed save was replacing", self.root / match[1])

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

    def unfinished(self, step: int) -> Path:
        """The folder of :meth:`begin`, until it is committed."""
        return self.root / f".global_step_{step}.tmp-{os.getpid()}"

    def _unfinished_pointer(self, pointer: str) -> Path:
        return self.root / f".{pointer}.tmp-{os.getpid()}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
