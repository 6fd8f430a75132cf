"""Keys of a run that differ from the schema's defaults, with the origins of their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from megarl.config.build import defaults
from megarl.config.inherited import inheriting_sections
from megarl.config.keys import leaves
from megarl.config.schema.jobs import JobConfig
from megarl.config.stored import stored_value
from megarl.config.verl.table import table_of

COMMAND_LINE, FILE, DERIVED, PLANNED = "command line", "file", "derived", "layout=auto"


class ChangedKey(NamedTuple):
    """A key whose value is not the schema's default.

    Attributes:
        value: value in the run, in its stored form.
        origin: ``command line``; ``file``, the named YAML file or one of its defaults; ``layout=auto``; or ``derived``
            from other keys, for keys that are ``auto`` in the schema; not for inherited ones.
    """

    key: str
    value: Any
    default: Any
    origin: str


def changed_keys(
    config: JobConfig,
    values: Mapping[str, Any] | DictConfig,
    overrides: Iterable[str],
    planned: Collection[str] = (),
) -> list[ChangedKey]:
    """List the keys that differ from the schema's defaults, with the origins of their values.

    Args:
        config: complete, as :func:`megarl.config.build.build` returns it.
        values: the values it was built from: files and command line.
        overrides: of the command line, in Hydra's syntax.
        planned: keys that ``layout=auto`` chose.
    """
    schema: Any = type(config)
    named = {table_of(schema).current_name(path) for path in overridden_keys(overrides)}
    plain: Any = OmegaConf.to_container(values) if isinstance(values, DictConfig) else values
    composed = dict(leaves(plain))
    schema_defaults, layouts = dict(leaves(defaults(schema))), tuple(inheriting_sections(schema, plain))
    changed = []
    for key, value in leaves(dataclasses.asdict(config)):
        default, stored = schema_defaults.get(key), stored_value(schema, key, value)
        if default not in (value, stored):
            in_file = composed.get(key, default) != default
            origin = PLANNED if key in planned else _origin(key, named, in_file=in_file)
            if origin != DERIVED or not key.startswith(layouts):  # an inherited key is no news
                changed.append(ChangedKey(key, stored, default, origin))
    return changed


def overridden_keys(overrides: Iterable[str]) -> set[str]:
    """Return the keys that overrides name, as they are written."""
    return {text.split("=", 1)[0].lstrip("+~") for text in overrides}


def _origin(key: str, named: set[str], *, in_file: bool) -> str:
    if any(key == name or key.startswith(f"{name}.") for name in named):
        return COMMAND_LINE
    return FILE if in_file else DERIVED
