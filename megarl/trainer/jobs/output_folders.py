"""Check of the folders that a training run writes: no run replaces the checkpoints or the export of another run."""

from __future__ import annotations

from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.base.units import count_noun
from megarl.config.schema.jobs import SupervisedConfig, TrainConfig
from megarl.trainer.state.checkpoint_manifest import is_whole
from megarl.trainer.state.checkpoint_store import CheckpointStore
from megarl.trainer.state.run_identity import read_run_id

CHECKPOINTS_KEY, EXPORT_KEY = "trainer.default_local_dir", "trainer.hf_export_dir"


def check_output_folders(config: TrainConfig | SupervisedConfig, resumed: Path | None) -> None:
    """Reject checkpoint and export folders with the work of another run, unless ``trainer.overwrite_output`` is set.

    Args:
        config: complete.
        resumed: checkpoint that the run resumes from; None for a new run.

    Raises:
        ConfigError: names the folder, its content, and the alternatives.
    """
    trainer = config.trainer
    if trainer.overwrite_output or (isinstance(config, TrainConfig) and config.trainer.val_only):
        return
    root, export = str(trainer.default_local_dir), trainer.hf_export_dir
    found = {}
    if may_save(config) and (steps := steps_of_others(CheckpointStore(root), resumed)):
        checkpoints = count_noun(len(steps), "checkpoint")
        found[CHECKPOINTS_KEY] = f"{root} holds {checkpoints} of another run, up to step {steps[-1]}"
    if export is not None and _is_foreign_export(Path(export), resumed):
        found[EXPORT_KEY] = f"{export} is not empty, and this run did not write it"
    if found:
        problems = [f"{key}={text}" for key, text in found.items()]
        can_resume = resumed is None and CHECKPOINTS_KEY in found
        raise ConfigError("\n".join([*problems, *_alternatives(list(found), can_resume=can_resume)]))


def may_save(config: TrainConfig | SupervisedConfig) -> bool:
    """Whether the configuration lets the run save checkpoints."""
    trainer = config.trainer
    best = isinstance(config, TrainConfig) and config.trainer.best_metric is not None
    return trainer.save_freq > 0 or trainer.max_wall_seconds is not None or best


def steps_of_others(store: CheckpointStore, resumed: Path | None) -> list[int]:
    """List the checkpoints of other runs that a run would replace or hide, by step.

    Args:
        store: checkpoints in the folder of the run.
        resumed: checkpoint that the run resumes from; in the same folder, other runs' earlier steps are not in its way.
            None for a new run: every checkpoint belongs to another run, complete or not.
    """
    if resumed is None:
        return store.steps()
    own = read_run_id(resumed)
    start = int(resumed.name.rpartition("_")[2]) if resumed.parent == store.root else 0
    folders = {step: store.root / f"global_step_{step}" for step in store.steps() if step > start}
    return [step for step, folder in folders.items() if is_whole(folder) and read_run_id(folder) != own]


def _is_foreign_export(folder: Path, resumed: Path | None) -> bool:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    run_id = read_run_id(folder)
    return run_id is None or resumed is None or run_id != read_run_id(resumed)


def _alternatives(keys: list[str], *, can_resume: bool) -> list[str]:
    other = " ".join(f"{key}=<another folder>" for key in keys)
    return [
        "The run would replace this work, so it does not start. Choose one:",
        *(["  continue the other run:  trainer.resume_mode=auto"] if can_resume else []),
        f"  keep both:               {other} (or another trainer.experiment_name, if the folder follows it)",
        "  replace the other's:     trainer.overwrite_output=true",
    ]
