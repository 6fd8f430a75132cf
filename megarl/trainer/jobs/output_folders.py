"""Folders and files that a job writes: checks and locks, so that no run replaces files of another run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.base.files import WRITABLE
from megarl.base.folder_lock import LockHolder, folder_lock
from megarl.base.formatting import count_noun
from megarl.base.run_writer import RUN_WRITER
from megarl.config.schema.jobs import EvaluateConfig, GenerateConfig, JobConfig, SupervisedConfig, TrainConfig
from megarl.config.stored import CHECKPOINTS_KEY, EXPORT_KEY, may_save, output_files, output_folders, response_folders
from megarl.trainer.state.checkpoint_manifest import ID_FILE, is_of_another_run, read_run_id
from megarl.trainer.state.checkpoint_store import CheckpointStore

RUN_FOLDER_KEY = "hydra.run.dir"
LOCK_FILE = ".run_lock"
"""Lock file in a folder; an export, which is replaced as a whole, has it next to its folder."""


def check_output_folders(config: TrainConfig | SupervisedConfig, resumed: Path | None) -> None:
    """Reject output folders with the work of another run, unless ``trainer.overwrite_output`` is set.

    Args:
        resumed: checkpoint that the run resumes from; None for a new run.

    Raises:
        ConfigError: names the folder, its content, and the alternatives.
    """
    trainer = config.trainer
    if trainer.overwrite_output:
        return
    trains = not (isinstance(config, TrainConfig) and config.trainer.val_only)
    root, export = str(trainer.default_local_dir), trainer.hf_export_dir
    conflicts = {}
    if trains and may_save(config) and (steps := _steps_of_others(CheckpointStore(root), resumed)):
        checkpoints = count_noun(len(steps), "checkpoint")
        conflicts[CHECKPOINTS_KEY] = f"{root} holds {checkpoints} of another run, up to step {steps[-1]}"
    if trains and export is not None and _is_foreign_export(Path(export), resumed):
        conflicts[EXPORT_KEY] = f"{export} is not empty, and this run did not write it"
    for key, folder in response_folders(config).items():
        if (files := _response_files(Path(folder))) and _is_of_another_run(Path(folder), resumed):
            conflicts[key] = f"{folder} holds {count_noun(len(files), 'file')} of responses of another run"
    if conflicts:
        problems = [f"{key}={text}" for key, text in conflicts.items()]
        can_resume = resumed is None and CHECKPOINTS_KEY in conflicts
        text = "\n".join([*problems, *_alternatives(list(conflicts), can_resume=can_resume)])
        raise ConfigError(text, code="disk.folder-of-other-run")


def check_output_files(config: EvaluateConfig | GenerateConfig, step: int | None = None) -> None:
    """Reject files of an earlier evaluation or generation, unless ``trainer.overwrite_output`` is set.

    Args:
        step: of the evaluated policy; None: the file with the responses of a step is not checked.

    Raises:
        ConfigError: names the file and the alternatives.
    """
    if config.trainer.overwrite_output:
        return
    files = output_files(config)
    if step is not None:
        files |= {key: str(Path(folder) / f"{step}.jsonl") for key, folder in response_folders(config).items()}
    if conflicts := {key: path for key, path in files.items() if Path(path).exists()}:
        problems = [f"{key}: {path} exists" for key, path in conflicts.items()]
        text = "\n".join([*problems, *_alternatives(list(conflicts), can_resume=False, kind="path")])
        raise ConfigError(text, code="disk.file-exists")


def claim_response_folders(config: TrainConfig, run_id: str) -> None:
    """Write the run's ID into its folders of responses, and remove the files of another run from them."""
    for name in response_folders(config).values():
        folder = Path(name)
        if read_run_id(folder) != run_id:
            for path in _response_files(folder):
                path.unlink()
            RUN_WRITER.replace(folder / ID_FILE, run_id)


def _steps_of_others(store: CheckpointStore, resumed: Path | None) -> list[int]:
    """List the checkpoints of other runs that a run would replace or hide, by step.

    Args:
        resumed: checkpoint that the run resumes from; in the same folder, other runs' earlier steps are not in its way.
            None for a new run: every checkpoint belongs to another run, complete or not.
    """
    if resumed is None:
        return store.steps()
    own = read_run_id(resumed)
    start = int(resumed.name.rpartition("_")[2]) if resumed.parent == store.root else 0
    folders = {step: store.root / f"global_step_{step}" for step in store.steps() if step > start}
    return [step for step, folder in folders.items() if is_of_another_run(folder, own)]


def _is_foreign_export(folder: Path, resumed: Path | None) -> bool:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    return _is_of_another_run(folder, resumed)


def _is_of_another_run(folder: Path, resumed: Path | None) -> bool:
    run_id = read_run_id(folder)
    return run_id is None or resumed is None or run_id != read_run_id(resumed)


def _response_files(folder: Path) -> list[Path]:
    """List the files ``<step>.jsonl`` and ``<step>.npz`` of a folder, which may be missing."""
    paths = [path for suffix in ("jsonl", "npz") for path in folder.glob(f"*.{suffix}")]
    return [path for path in paths if path.stem.isdigit()]


def _alternatives(keys: list[str], *, can_resume: bool, kind: str = "folder") -> list[str]:
    other = " ".join(f"{key}=<another {kind}>" for key in keys)
    return [
        "The run would replace this work, so it does not start. Choose one:",
        *(["  continue the other run:  trainer.resume_mode=auto"] if can_resume else []),
        f"  keep both:               {other} (or another trainer.experiment_name, if the folder follows it)",
        "  replace the other's:     trainer.overwrite_output=true",
    ]


@contextmanager
def locked_output_folders(config: JobConfig, folder: Path) -> Iterator[None]:
    """Lock the folders that a run writes, within the block: run files, checkpoints, export and responses.

    Raises:
        ConfigError: another run holds a lock; names the folder, the holder, and the key.
    """
    own = LockHolder(config.trainer.experiment_name, str(folder.resolve()))
    with ExitStack() as stack:
        for file, key in _lock_files(config, folder).items():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                text = f"{key}={file.parent}: cannot be written to ({error.strerror}); {WRITABLE}"
                raise ConfigError(text, code="disk.not-writable") from error
            remedy = f"Wait for its end, or set {key}=<another folder>"
            stack.enter_context(folder_lock(file, own, remedy, _describe_holder))
        yield


def _lock_files(config: JobConfig, folder: Path) -> dict[Path, str]:
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
