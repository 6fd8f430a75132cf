"""Stored form of a configuration: secrets redacted, references to environment variables unresolved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megarl.base.redaction import REDACTED, is_secret_name, redact, remember_secrets
from megarl.config.keys import AUTO, find_key, leaves
from megarl.config.problems import Problem
from megarl.config.schema.jobs import JobConfig
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
