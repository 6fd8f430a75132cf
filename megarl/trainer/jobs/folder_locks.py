"""Locks of the folders that a run writes, so that two concurrent runs never mix their files or checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.base.files import WRITABLE
from megarl.base.folder_lock import LockHolder, folder_lock
from megarl.config.outputs import CHECKPOINTS_KEY, EXPORT_KEY, output_folders
from megarl.config.schema.jobs import JobConfig, TrainConfig
from megarl.trainer.state.run_identity import read_run_id

RUN_FOLDER_KEY = "hydra.run.dir"
LOCK_FILE = ".run_lock"
"""Lock file in a folder; an export, which is replaced as a whole, has it next to its folder."""


@contextmanager
def locked_output_folders(config: JobConfig, folder: Path) -> Iterator[None]:
    """Lock the folders that a run writes, within the block: run files, checkpoints, export and responses.

    Args:
        config: complete.
        folder: folder of the run's files, which exists.

    Raises:
        ConfigError: another run holds a lock; names the folder, the holder, and the key.
    """
    own = LockHolder(config.trainer.experiment_name, str(folder.resolve()))
    with ExitStack() as stack:
        for file, key in lock_files(config, folder).items():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror
                raise ConfigError(f"{key}={file.parent}: cannot be written to ({reason}); {WRITABLE}") from error
            remedy = f"Wait for its end, or set {key}=<another folder>"
            stack.enter_context(folder_lock(file, own, remedy, _describe_holder))
        yield


def lock_files(config: JobConfig, folder: Path) -> dict[Path, str]:
    """List a run's lock files with the keys of their folders, one per folder."""
    files = {folder.resolve() / LOCK_FILE: RUN_FOLDER_KEY}
    if getattr(config.trainer, "dry_run", False):
        return files
    reads_only = isinstance(config, TrainConfig) and config.trainer.val_only
    for key, name in output_folders(config).items():
        path = Path(name).resolve()
        if reads_only and key in (CHECKPOINTS_KEY, EXPORT_KEY):
            continue
        files.setdefault(path.with_name(f".{path.name}{LOCK_FILE}") if key == EXPORT_KEY else path / LOCK_FILE, key)
    return files


def _describe_holder(holder: LockHolder) -> str:
    run_id = read_run_id(Path(holder.folder))
    return holder.describe() + (f", run ID {run_id}" if run_id else "")
