"""From plain values to a typed configuration: unknown keys, types and limits are checked here, all at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.checks import check
from megarl.config.derived import fill_derived
from megarl.config.external import external_problems
from megarl.config.jobs import JobT
from megarl.config.keys import REQUIRED, Key, keys_of, walk
from megarl.config.problems import InvalidConfigError, Problem, nearest_keys
from megarl.config.schema import TrainConfig
from megarl.config.verl.adopt import Adoption, adopt

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def build(schema: type[JobT], values: Mapping[str, Any] | DictConfig, files_root: str | None = None) -> JobT:
    """Makes a typed configuration out of nested values, complete and checked.

    Args:
        schema: a class of :data:`megarl.config.jobs.JobConfig`; it supplies every default.
        values: what differs from the defaults; interpolations may refer to any key.
        files_root: folder under which files without an explicit place go; None = ``outputs/<experiment_name>``.

    The modules of ``model.external_lib`` are imported: they may register what the configuration names.

    Returns:
        An instance of ``schema`` in which keys documented as "null = ..." are filled in.

    Raises:
        InvalidConfigError: with every problem found.
    """
    adopted = _adopted(schema, values)
    config = cast(JobT, read(cast(type, schema), adopted.values, adopted.problems))
    fill_derived(config, files_root)
    problems = check(config) or list(external_problems(config))
    if problems:
        docs = {path: item.doc for path, item in walk(config)}
        raise InvalidConfigError(problem._replace(doc=docs.get(problem.path, "")) for problem in problems)
    return config


def read(schema: type, values: Mapping[str, Any], found: Sequence[Problem] = ()) -> Any:
    """A typed instance of any class whose fields are declared with :func:`~megarl.config.keys.key`.

    Args:
        schema: the class; it supplies every default.
        values: nested plain values that differ from the defaults.
        found: problems known before.

    Raises:
        InvalidConfigError: a key is unknown or missing, or its value of the wrong type or out of its limits.
    """
    typed = copy.deepcopy(_typed(schema))  # six times as fast as reading the classes again
    problems = [*_fill(typed, schema, values, "", [path for path, _ in walk(schema)]), *found]
    wrong = {problem.path for problem in problems}
    keys = dict(walk(schema))
    for path in sorted(OmegaConf.missing_keys(typed) - wrong):
        problems.append(Problem(path, None, f"must be set, to {_expected(keys[path])}", keys[path].doc))
    if problems:
        raise InvalidConfigError(problems)
    return OmegaConf.to_object(typed)


@cache
def _typed(schema: type) -> DictConfig:
    return cast(DictConfig, OmegaConf.structured(schema))


@cache
def defaults(schema: type) -> Mapping[str, Any]:
    """The schema's defaults as nested plain values, to be read only."""
    return cast(dict[str, Any], OmegaConf.to_container(_typed(schema)))


def verl_notes(schema: type, values: Mapping[str, Any] | DictConfig) -> list[str]:
    """What becomes of those of ``values`` that are verl's: a line for each that is translated or has no effect."""
    return _adopted(schema, values).notes


def _adopted(schema: type, values: Mapping[str, Any] | DictConfig) -> Adoption:
    resolved = _resolved(schema, values)
    return adopt(resolved) if schema is TrainConfig else Adoption(dict(resolved), [], [])


def _resolved(schema: type, values: Mapping[str, Any] | DictConfig) -> Mapping[str, Any]:
    merged = OmegaConf.merge(defaults(schema), values)
    try:
        return cast(Mapping[str, Any], OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        path, raw = str(error.full_key), OmegaConf.to_container(merged)
        for name in path.split("."):
            raw = raw.get(name) if isinstance(raw, dict) else None
        raise InvalidConfigError([Problem(path, raw, str(error).strip().splitlines()[0])]) from error


def _fill(node: DictConfig, schema: Any, given: Mapping[str, Any], prefix: str, known: list[str]) -> list[Problem]:
    declared = {item.name: item for item in keys_of(schema)}
    problems = []
    for name, value in given.items():
        path = f"{prefix}{name}"
        item = declared.get(name)
        if item is None:
            problems.append(unknown_key(path, value, known))
        elif item.section is not None and value is not None:
            problems += _fill_section(node, item, value, path, known)
        else:
            problem = _assign(node, item, value, path)
            problems += [problem] if problem else []
    return problems


def _fill_section(node: DictConfig, item: Key, value: Any, path: str, known: list[str]) -> list[Problem]:
    assert item.section is not None
    if not isinstance(value, Mapping):
        names = ", ".join(inner.name for inner in keys_of(item.section))
        return [Problem(path, value, f"is a section, not a single value; its keys are {names}")]
    if node[item.name] is None:
        node[item.name] = item.section()
    return _fill(node[item.name], item.section, value, f"{path}.", known)


def _assign(node: DictConfig, item: Key, value: Any, path: str) -> Problem | None:
    if isinstance(value, str) and value == REQUIRED:
        return Problem(path, value, f"has no default and must be set, to {_expected(item)}", item.doc)
    if item.is_list and isinstance(value, str | int | float):
        value = [value]
    if isinstance(value, bool) and item.annotation is not bool:
        return Problem(path, value, f"must be {_expected(item)}", item.doc)
    try:
        node[item.name] = value
    except OmegaConfBaseException:
        return Problem(path, value, f"must be {_expected(item)}", item.doc)
    converted = node[item.name]
    complaint = item.limits.complaint(OmegaConf.to_container(converted) if OmegaConf.is_list(converted) else converted)
    return Problem(path, value, complaint, item.doc) if complaint else None


def unknown_key(path: str, value: Any, known: list[str]) -> Problem:
    """The problem that a key is in no schema, with the nearest one that is."""
    nearest = " or ".join(nearest_keys(path, known))
    return Problem(path, value, "unknown key" + (f"; did you mean {nearest}?" if nearest else ""))


def _expected(item: Key) -> str:
    words = _TYPE_WORDS.get(item.annotation) or f"a {item.type_name.removesuffix(' or null')}"
    limits = item.limits.describe()
    words = f"{words} ({limits})" if limits else words
    return f"{words} or null" if item.optional else words
