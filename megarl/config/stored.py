"""What a run leaves: its configuration in stored form (without secrets), and the paths that it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megarl.base.errors import ConfigError
from megarl.base.redaction import REDACTED, is_secret_name, redact, remember_secrets
from megarl.config.keys import AUTO, find_key, leaves, value_at
from megarl.config.problems import Problem
from megarl.config.schema.jobs import JobConfig, SupervisedConfig, TrainConfig
from megarl.config.verl.table import table_of

_REFERENCE = "${oc.env:"


_REFERENCES: ContextVar[Mapping[str, str] | None] = ContextVar("references", default=None)
"""References to environment variables in the configuration of the present run, by dotted path."""


@contextmanager
def references_of(config: JobConfig, values: Mapping[str, Any] | DictConfig) -> Iterator[None]:
    """Within the context, store a run's references as its unresolved values have them, and redact its secrets."""
    raw = OmegaConf.to_container(values) if isinstance(values, DictConfig) else values
    assert isinstance(raw, Mapping)
    current_name = table_of(type(config)).current_name
    token = _REFERENCES.set(
        {current_name(path): value for path, value in leaves(raw) if isinstance(value, str) and _REFERENCE in value}
    )
    remember_secrets(dataclasses.asdict(config))
    try:
        yield
    finally:
        _REFERENCES.reset(token)


def stored_config(config: JobConfig) -> dict[str, Any]:
    """Return a configuration as nested plain values that may be written to a file or sent to a tracker."""
    schema, plain = type(config), dataclasses.asdict(config)
    return {name: _stored(schema, value, str(name)) for name, value in plain.items()}


def stored_value(schema: type, path: str, value: Any) -> Any:
    """Return the value of one key in its stored form: ``auto`` for a value that a later phase derives."""
    if value is None and (item := find_key(schema, path)) is not None and item.auto:
        return AUTO
    return (_REFERENCES.get() or {}).get(path) or redact(value, path.rpartition(".")[2])


def redacted_problems(config: JobConfig) -> Iterator[Problem]:
    """Find values that come from a stored configuration, which has them redacted."""
    for path, value in leaves(dataclasses.asdict(config)):
        if REDACTED in str(value):
            text = (
                f"the stored configuration does not have this secret: set it again, such as {path}='${{oc.env:NAME}}'"
            )
            yield Problem(path, value, text, code="config.redacted-secret")


def _stored(schema: type, value: Any, path: str) -> Any:
    if isinstance(value, Mapping) and not is_secret_name(path.rpartition(".")[2]):
        return {key: _stored(schema, inner, f"{path}.{key}") for key, inner in value.items()}
    return stored_value(schema, path, value)


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
