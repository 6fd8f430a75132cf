"""Paths that a job writes in addition to its folder; the runs of a sweep must share none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megarl.base.errors import ConfigError
from megarl.config.keys import AUTO, find_key, value_at
from megarl.config.schema.jobs import JobConfig, SupervisedConfig, TrainConfig

CHECKPOINTS_KEY, EXPORT_KEY = "trainer.default_local_dir", "trainer.hf_export_dir"
ROLLOUTS_KEY, VALIDATION_KEY = "trainer.rollout_data_dir", "trainer.validation_data_dir"
BEST_KEY, ANSWERS_KEY = "best_answers.file", "data.output_path"


def may_save(config: TrainConfig | SupervisedConfig) -> bool:
    """Return whether the configuration lets the run save checkpoints."""
    trainer = config.trainer
    best = isinstance(config, TrainConfig) and config.trainer.best_metric is not None
    return trainer.save_freq > 0 or trainer.max_wall_seconds is not None or best


def _paths(config: JobConfig, keys: Iterable[str]) -> dict[str, str]:
    """Paths by key, of the keys that the job has and that are set."""
    values = {key: value_at(config, key) for key in keys if find_key(type(config), key)}
    return {key: value for key, value in values.items() if value is not None}


def output_folders(config: JobConfig) -> dict[str, str]:
    """Return the folders of checkpoints, export and responses that a job writes, by key."""
    saves = isinstance(config, TrainConfig | SupervisedConfig) and may_save(config)
    return _paths(config, [CHECKPOINTS_KEY, EXPORT_KEY] if saves else [EXPORT_KEY]) | response_folders(config)


def response_folders(config: JobConfig) -> dict[str, str]:
    """Return the folders of ``<step>.jsonl`` files with responses, by key."""
    return _paths(config, (ROLLOUTS_KEY, VALIDATION_KEY))


def output_files(config: JobConfig) -> dict[str, str]:
    """Return the single files that a job writes at its end, by key."""
    return _paths(config, (BEST_KEY, ANSWERS_KEY))


def check_sweep_outputs(configs: Sequence[JobConfig]) -> None:
    """Reject a sweep in which two runs write the same path, except intended replacements and dry runs.

    Raises:
        ConfigError: names the key, the path, and both runs.
    """
    writers: dict[tuple[str, str], int] = {}
    for number, config in enumerate(configs):
        if config.trainer.overwrite_output or getattr(config.trainer, "dry_run", False):
            continue
        for key, path in (output_folders(config) | output_files(config)).items():
            first = writers.setdefault((key, path), number)
            if first != number:
                item = find_key(type(config), key)
                unset = AUTO if item and item.accepts_auto else "null"
                raise ConfigError(
                    f"{key}={path}: runs {first} and {number} of the sweep would both write it. Set {key}={unset}: "
                    "each run then has its own folder, or writes no such files; or list a path for each run; or set "
                    "trainer.overwrite_output=true to keep the last run's",
                    code="config.sweep-shared-output",
                )
