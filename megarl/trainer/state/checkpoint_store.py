"""Checkpoint store: atomic saves into one folder, retention, and verified resume from the newest complete checkpoint.

::

    <root>/global_step_<N>/{actor/, critic/, trainer_state.json, ..., manifest.json}
    <root>/latest_checkpointed_iteration.txt      the step to resume from
    <root>/best_checkpointed_iteration.txt        the step with the best validation, if configured

A save is written into a hidden folder, flushed, listed in its manifest, and then renamed into place. A second rename
updates the pointer. A save that is killed at any moment leaves the earlier checkpoints and a pointer to one of them.
One run at a time saves into a root. Each checkpoint has the ID of its run; a run removes its own checkpoints only.
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

from megarl.base.atomic_write import atomic_write, replace_folder, restore_replaced_folder
from megarl.base.checkpoint_files import POINTER
from megarl.base.errors import CheckpointError, ConfigError
from megarl.base.files import FileEntry
from megarl.trainer.state.checkpoint_manifest import (
    ID_FILE,
    NO_ENTRIES,
    Manifest,
    Retention,
    Score,
    is_of_another_run,
    is_whole,
    limit_key,
    read_manifest,
    read_run_id,
    roles_in,
    verify_files,
    write_document,
    write_manifest,
)

BEST_POINTER = "best_checkpointed_iteration.txt"
RESUME_MODES = ("auto", "must", "disable", "resume_path")
_FOLDER = re.compile(r"global_step_(\d+)")
_UNFINISHED = re.compile(r"\.(?:global_step_\d+|(?:latest|best)_checkpointed_iteration\.txt)\.tmp-(\d+)")
_REPLACED = re.compile(r"\.(global_step_\d+)\.replaced")

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        retention: selects the checkpoints to keep; by default all.
        run_id: ID of the run, written into its checkpoints; None = no ID.
    """

    def __init__(
        self,
        root: str | Path,
        retention: Retention | None = None,
        run_id: str | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.root = Path(root).absolute()  # workers have other working folders
        self.retention = retention or Retention()
        self.run_id = run_id
        self.overwrite = overwrite

    def begin(self, step: int) -> Path:
        """Create an empty folder for a save of driver and workers; remove unfinished saves of dead runs.

        Raises:
            CheckpointError: the folder cannot be created, or another run has saved this step.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._restore_replaced()
            self._remove_leftovers()
            self._check_owner(step)
            folder = self.unfinished(step)
            folder.mkdir()
            if self.run_id is not None:
                (folder / ID_FILE).write_text(self.run_id, encoding="ascii")
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint of step {step} can be written to {self.root}: {error}", code="checkpoint.save-failed"
            ) from error
        return folder

    def commit(self, step: int, entries: Mapping[str, FileEntry] = NO_ENTRIES, score: Score | None = None) -> Path:
        """Turn the folder of :meth:`begin` into the newest checkpoint, update the pointer, and apply the retention.

        Args:
            entries: of files that their writers have flushed and hashed; they are not read again.

        Returns:
            The finished folder ``<root>/global_step_<step>``.

        Raises:
            CheckpointError: the save failed, for example on a full disk. Earlier checkpoints are unchanged, and the
                unfinished one is removed.
        """
        unfinished, folder = self.unfinished(step), self.root / f"global_step_{step}"
        if not unfinished.is_dir():
            raise CheckpointError(
                f"checkpoint of step {step} was not started: {unfinished} does not exist", code="checkpoint.not-started"
            )
        try:
            sequence = 1 + max((manifest.sequence for manifest in self._manifests()), default=0)
            write_manifest(unfinished, step, sequence, entries, score)
            replace_folder(unfinished, folder)
            self._point_to(step, POINTER)
        except (OSError, CheckpointError) as error:
            self.abort(step)
            raise self._failure(step, error) from error
        if self.overwrite:
            self._remove_others()
        self._apply_retention()
        return folder

    def abort(self, step: int) -> None:
        """Remove the unfinished folder of a step; never raises."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)
        with suppress(OSError):
            self._unfinished_pointer(POINTER).unlink()

    @contextmanager
    def saving(self, step: int, score: Score | None = None) -> Iterator[Path]:
        """Save within a block: :meth:`begin`, then :meth:`commit`, or :meth:`abort` if the block raises.

        Raises:
            CheckpointError: see both methods; or the block raised an OSError.
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
        reason = error.text if isinstance(error, CheckpointError) else error
        return CheckpointError(
            f"saving the checkpoint of step {step} to {self.root} failed: {reason}; earlier checkpoints are kept",
            code="checkpoint.save-failed",
        )

    def best(self) -> Manifest | None:
        """Return the run's best complete checkpoint by the metric of the retention; None without one."""
        return self.retention.best_of(self._own())

    def resolve(
        self, resume_mode: str, resume_from_path: str | Path | None = None, roles: Collection[str] = ()
    ) -> Path | None:
        """Select and verify the checkpoint to resume from.

        Args:
            resume_mode: ``auto``: the checkpoint of the pointer, else (with a warning) the newest complete one;
                ``must``: the same, and an error without one; ``disable``: none; ``resume_path``: ``resume_from_path``.
            resume_from_path: a folder ``global_step_<N>``.

        Returns:
            The folder, or None to start at step 0: with ``disable``, or with ``auto`` and no save so far.

        Raises:
            CheckpointError: the checkpoint of ``resume_path`` is not complete; with ``auto`` there are saves but no
                complete one, since a run never restarts at step 0 silently; with ``must`` there is no save.
            ConfigError: unknown mode, or ``resume_path`` without a path.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            if not resume_from_path:
                raise ConfigError(
                    "trainer.resume_from_path must be set with trainer.resume_mode=resume_path", code="resume.no-path"
                )
            self.verify(resume_from_path, roles)
            return Path(resume_from_path).absolute()
        if resume_mode in ("auto", "must"):
            newest = self._newest(roles)
            if newest is None and resume_mode == "must":
                raise CheckpointError(
                    f"trainer.resume_mode=must, but there is no checkpoint in {self.root}: check "
                    "trainer.default_local_dir, or start a new run with trainer.resume_mode=auto",
                    code="resume.no-checkpoint",
                )
            return newest
        raise ConfigError(
            f"trainer.resume_mode={resume_mode!r}, expected one of: {', '.join(RESUME_MODES)}",
            code="config.value-out-of-limits",
        )

    def verify(self, path: str | Path, roles: Collection[str] = ()) -> None:
        """Read all files of a checkpoint and compare them with its manifest.

        Raises:
            CheckpointError: names the folder and each missing, altered or foreign file, or the missing role.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint {folder} does not exist or is not a folder", code="checkpoint.no-folder")
        manifest = verify_files(folder)
        match = _FOLDER.fullmatch(folder.name)
        if match and int(match[1]) != manifest.step:
            raise CheckpointError(
                f"checkpoint {folder} holds step {manifest.step}: it was renamed; name it global_step_{manifest.step}",
                code="checkpoint.renamed-folder",
            )
        missing = [role for role in roles if role not in roles_in(manifest)]
        if missing:
            raise CheckpointError(
                f"checkpoint {folder} holds no {' and no '.join(missing)}: it was saved without this role, or "
                f"{limit_key(missing[0])} removed it",
                code="checkpoint.missing-role",
            )

    def steps(self) -> list[int]:
        """List the steps of all folders in the root, complete or not, in ascending order."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def own_steps(self) -> list[int]:
        """List the steps of :meth:`steps` that this run, or a run it resumed from, has saved."""
        return [step for step in self.steps() if self._is_own(step)]

    def _newest(self, roles: Collection[str]) -> Path | None:
        self._restore_replaced()
        steps, pointer = self.steps(), self.root / POINTER
        if not steps and not pointer.exists():
            return None
        problems = []
        pointed = self._read_pointer()
        if isinstance(pointed, str):
            problems.append(f"{pointer}: {pointed}")
        elif pointed not in steps:
            problems.append(f"{pointer} names step {pointed}, but {self.root}/global_step_{pointed} does not exist")
        sequences = {manifest.step: manifest.sequence for manifest in self._manifests()}
        by_age = sorted(steps, key=lambda step: (step == pointed, sequences.get(step, 0), step), reverse=True)
        for step in by_age:
            folder = self.root / f"global_step_{step}"
            try:
                self.verify(folder, roles)
            except CheckpointError as error:
                problems.append(error.text)
                continue
            if problems:
                logger.warning("Resuming from %s, because: %s", folder, "; ".join(problems))
            return folder
        raise CheckpointError(
            f"nothing to continue from in {self.root}: {'; '.join(problems)}. "
            "To start at step 0, set trainer.resume_mode=disable and another trainer.default_local_dir, or "
            "trainer.overwrite_output=true",
            code="resume.nothing-complete",
        )

    def _read_pointer(self) -> int | str:
        """Step of the pointer, or the problem with it as text."""
        try:
            text = (self.root / POINTER).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"cannot be read ({error})"
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else f"holds {text[:40]!r}, expected a step number"

    def _point_to(self, step: int, pointer: str) -> None:
        unfinished = self._unfinished_pointer(pointer)
        with atomic_write(self.root / pointer, flush=True, temporary=unfinished) as temporary:
            temporary.write_text(f"{step}\n", encoding="ascii")

    def _manifests(self) -> list[Manifest]:
        """Readable manifests, with the steps of the folder names."""
        manifests = []
        for step in self.steps():
            with suppress(CheckpointError):
                manifests.append(replace(read_manifest(self.root / f"global_step_{step}"), step=step))
        return manifests

    def _is_own(self, step: int) -> bool:
        return read_run_id(self.root / f"global_step_{step}") == self.run_id

    def _own(self) -> list[Manifest]:
        """Complete checkpoints of this run and the runs it resumed from."""
        complete = [manifest for manifest in self._manifests() if is_whole(self.root / f"global_step_{manifest.step}")]
        return [manifest for manifest in complete if self._is_own(manifest.step)]

    def _check_owner(self, step: int) -> None:
        """Reject a step that another run has saved; a damaged checkpoint has no owner."""
        folder = self.root / f"global_step_{step}"
        if not self.overwrite and is_of_another_run(folder, self.run_id):
            raise CheckpointError(
                f"{folder} is a checkpoint of another run; set another trainer.default_local_dir, or "
                "trainer.overwrite_output=true",
                code="checkpoint.other-run",
            )

    def _remove_others(self) -> None:
        """Remove the checkpoints of other runs; log failures."""
        for step in self.steps():
            if self._is_own(step):
                continue
            try:
                self._remove(step)
            except OSError as error:
                logger.warning("the checkpoint of step %d of another run could not be removed: %s", step, error)

    def _apply_retention(self) -> None:
        """Update the pointer to the best checkpoint and remove surplus ones of this run; log failures.

        Damaged folders are ignored: they neither displace a complete checkpoint nor are they removed.
        """
        complete = self._own()
        best = self.retention.best_of(complete)
        try:
            if best is not None:
                self._point_to(best.step, BEST_POINTER)
        except OSError as error:
            logger.warning("%s could not be written: %s", self.root / BEST_POINTER, error)
        for step, roles in self.retention.removals(complete):
            try:
                self._remove(step) if roles is None else self._remove_roles(step, roles)
            except (OSError, CheckpointError) as error:
                subject = "" if roles is None else f"{' and '.join(roles)} of "
                logger.warning("%sthe outdated checkpoint of step %d could not be removed: %s", subject, step, error)

    def _remove(self, step: int) -> None:
        hidden = self.unfinished(step)
        # Hide first, so that a reader never sees a half-removed folder.
        (self.root / f"global_step_{step}").rename(hidden)
        shutil.rmtree(hidden)

    def _remove_roles(self, step: int, roles: Collection[str]) -> None:
        """Replace a checkpoint atomically by one without the files of some roles."""
        folder, reduced = self.root / f"global_step_{step}", self.unfinished(step)
        manifest = read_manifest(folder)
        kept = {name: entry for name, entry in manifest.files.items() if name.split("/")[0] not in roles}
        try:
            for name in kept:
                (reduced / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(folder / name, reduced / name)
            write_document(reduced, replace(manifest, files=kept))
            replace_folder(reduced, folder)
        finally:
            shutil.rmtree(reduced, ignore_errors=True)

    def _restore_replaced(self) -> None:
        """Undo a killed replacement on a file system that cannot exchange two names."""
        for entry in self.root.iterdir() if self.root.is_dir() else ():
            match = _REPLACED.fullmatch(entry.name)
            if match and restore_replaced_folder(self.root / match[1]):
                logger.warning("Restored %s, which a killed save was replacing", self.root / match[1])

    def _remove_leftovers(self) -> None:
        for entry in self.root.iterdir():
            match = _UNFINISHED.fullmatch(entry.name)
            # This process id belongs to an earlier save of this run, or to a dead run with the same id.
            if not match or (int(match[1]) != os.getpid() and _is_alive(int(match[1]))):
                continue
            logger.warning("Removing %s, left behind by an interrupted save", entry)
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def unfinished(self, step: int) -> Path:
        """Return the folder of :meth:`begin`, until it is committed."""
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
