"""Where the values of a configuration come from that are not the schema's defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from megarl.config.build import defaults
from megarl.config.jobs import JobConfig

COMMAND_LINE, FILE, DERIVED = "command line", "file", "derived"


class Difference(NamedTuple):
    """A key whose value is not the schema's default.

    Attributes:
        key: dotted.
        value: what the run has.
        default: what the schema has.
        origin: ``command line``, ``file`` (the YAML that was named, or one that it builds on), or ``derived`` from
            other keys where the schema has null.
    """

    key: str
    value: Any
    default: Any
    origin: str


def differences(
    config: JobConfig, values: Mapping[str, Any] | DictConfig, overrides: Iterable[str]
) -> list[Difference]:
    """Every key of a complete configuration that differs from the schema's defaults.

    Args:
        config: complete, as :func:`megarl.config.build.build` returns it.
        values: what it was built from: files and command line.
        overrides: of the command line, in Hydra's syntax.
    """
    schema: Any = type(config)
    named = {text.split("=", 1)[0].lstrip("+~") for text in overrides}
    given = dict(_leaves(OmegaConf.to_container(values) if isinstance(values, DictConfig) else values))
    plain = dict(_leaves(defaults(schema)))
    found = []
    for key, value in _leaves(dataclasses.asdict(config)):
        default = plain.get(key)
        if value != default:
            found.append(Difference(key, value, default, _origin(key, named, given.get(key, default) != default)))
    return found


def _origin(key: str, named: set[str], is_given: bool) -> str:
    if any(key == name or key.startswith(f"{name}.") for name in named):
        return COMMAND_LINE
    return FILE if is_given else DERIVED


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{path}.")
        else:
            yield path, inner
