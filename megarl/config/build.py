"""Build a typed configuration from plain values, and list the keys that differ from the schema's defaults.

The build checks unknown keys, types and limits, and reports all problems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.base.errors import ConfigError
from megarl.base.user_code import import_user_modules
from megarl.config.checks import check
from megarl.config.derived import inherit, inheriting_sections, with_derived, without_auto
from megarl.config.keys import AUTO, REQUIRED, Key, keys_of, leaves, lookup, walk
from megarl.config.problems import InvalidConfigError, Problem, namesakes, nearest_keys
from megarl.config.schema.jobs import JobConfig, JobT, SupervisedConfig, TrainConfig
from megarl.config.stored import redacted_problems, stored_value
from megarl.config.synonyms import synonyms
from megarl.config.verl.adopt import Adoption, adopt
from megarl.config.verl.table import table_of

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def build(
    schema: type[JobT],
    values: Mapping[str, Any] | DictConfig,
    files_root: str | None = None,
    overridden: Collection[str] = (),
) -> JobT:
    """Build the complete, checked and frozen configuration of a job from nested values.

    The modules of ``model.external_lib`` are imported, because they may register names that the configuration uses.

    Args:
        values: values that differ from the defaults; interpolations may refer to any key.
        files_root: folder of files without an explicit path; None = ``outputs/<experiment_name>``.
        overridden: keys of the command line, see :func:`~megarl.config.verl.adopt.adopt`.

    Returns:
        An instance of ``schema``, with keys documented as "auto = ..." filled.

    Raises:
        InvalidConfigError: with every problem.
    """
    config = _complete(schema, values, files_root, overridden)
    _raise(config, check(config) or list(redacted_problems(config)) or list(_external_problems(config)))
    return config


def build_draft(schema: type[JobT], values: Mapping[str, Any] | DictConfig) -> JobT:
    """Build as :func:`build`, without the checks across sections, for a search over keys that they may reject.

    Raises:
        InvalidConfigError: with every problem of single keys.
    """
    config = _complete(schema, values, None, ())
    _raise(config, list(_external_problems(config)))
    return config


def _complete(
    schema: type[JobT], values: Mapping[str, Any] | DictConfig, files_root: str | None, overridden: Collection[str]
) -> JobT:
    adopted = _adopted(schema, values, overridden)
    inherited = inherit(schema, adopted.values)
    try:
        config = cast(JobT, read(schema, adopted.values, adopted.problems))
    except InvalidConfigError as error:  # an inherited problem is the actor's
        raise InvalidConfigError(problem for problem in error.problems if problem.path not in inherited) from error
    return with_derived(config, files_root)


def _raise(config: JobConfig, problems: Sequence[Problem]) -> None:
    if problems:
        docs = {path: item.doc for path, item in walk(config)}
        raise InvalidConfigError(problem._replace(doc=docs.get(problem.path, "")) for problem in problems)


def _external_problems(config: JobConfig) -> Iterator[Problem]:
    """Import the modules of ``external_lib`` into this process."""
    supervised = isinstance(config, SupervisedConfig)
    path = "model.external_lib" if supervised else "actor_rollout_ref.model.external_lib"
    model = config.model if isinstance(config, SupervisedConfig) else config.actor_rollout_ref.model
    for spec in model.user_modules:
        try:
            import_user_modules(spec)
        except ConfigError as error:
            yield Problem(path, spec, error.text, code=error.code)


def read(schema: type, values: Mapping[str, Any], problems: Sequence[Problem] = ()) -> Any:
    """Read nested plain values into any class whose fields are declared with :func:`~megarl.config.keys.key`.

    Raises:
        InvalidConfigError: a key is unknown or missing, or its value has the wrong type or violates its limits.
    """
    found: list[Problem] = []
    config = _filled(schema(), values, "", [path for path, _ in walk(schema)], found)
    found += problems
    wrong = {problem.path for problem in found}
    unset = {path: item for path, item in walk(config) if item.default == REQUIRED and path not in wrong}
    for path, item in sorted(unset.items()):
        text = f"must be set, to {_expected(item)}"
        found.append(Problem(path, None, text, doc=item.doc, code="config.required-key"))
    if found:
        raise InvalidConfigError(found)
    return config


@cache
def defaults(schema: type) -> Mapping[str, Any]:
    """Return the schema's defaults as nested plain values, read-only."""
    plain = dataclasses.asdict(schema())
    for path, item in walk(schema):
        section, _, name = path.rpartition(".")
        if item.accepts_auto and (holder := lookup(plain, section) if section else plain) is not None:
            holder[name] = AUTO
    return plain


def verl_notes(schema: type, values: Mapping[str, Any] | DictConfig, overridden: Collection[str] = ()) -> list[str]:
    """Describe verl's keys in ``values``: one line for each that is translated or has no effect."""
    return _adopted(schema, values, overridden).notes


def _adopted(schema: type, values: Mapping[str, Any] | DictConfig, overridden: Collection[str]) -> Adoption:
    return adopt(schema, without_auto(schema, _resolved(schema, values)), overridden)


def _resolved(schema: type, values: Mapping[str, Any] | DictConfig) -> Mapping[str, Any]:
    """Resolve interpolations, which may refer to any key; values that are not set are the schema's defaults."""
    given = values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))
    with suppress(OmegaConfBaseException):  # a reference to a key that has its default, or an error; see below
        return _over(defaults(schema), cast(Mapping[str, Any], OmegaConf.to_container(given, resolve=True)))
    merged = OmegaConf.merge(defaults(schema), values)
    try:
        return cast(Mapping[str, Any], OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        path, text = str(error.full_key), str(error).strip().splitlines()[0]
        raw = lookup(OmegaConf.to_container(merged), path)
        raise InvalidConfigError([Problem(path, raw, text, code="config.interpolation")]) from error


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested plain values as OmegaConf does, in a tenth of its time: lists are replaced, ``???`` sets nothing."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        if isinstance(value, Mapping):
            merged[name] = _over(inner if isinstance(inner, Mapping) else {}, value)
        elif value != REQUIRED or name not in merged:
            merged[name] = value
    return merged


def _filled(config: Any, values: Mapping[str, Any], prefix: str, valid: list[str], problems: list[Problem]) -> Any:
    """Return a copy of a section with other values, and append the problems of its keys.

    Args:
        prefix: the section's path, with a dot at its end.
        valid: keys of the job, or of an entry with a free name, for suggestions.
    """
    declared = {item.name: item for item in keys_of(config)}
    changes = {}
    for name, value in values.items():
        path, item = f"{prefix}{name}", declared.get(name)
        if item is None:
            problems.append(unknown_key(path, value, valid))
        elif item.section is not None and value is not None:
            changes[name] = _section(item.default or item.section(), value, path, valid, problems)
        elif item.entry is not None and isinstance(value, Mapping):
            inner = [key for key, _ in walk(item.entry)]
            changes[name] = {
                entry: _section(
                    item.entry(), keys, f"{path}.{entry}", [f"{path}.{entry}.{key}" for key in inner], problems
                )
                for entry, keys in value.items()
            }
        else:
            converted, problem = _value(item, value, path)
            if problem is None:
                changes[name] = converted
            else:
                problems.append(problem)
    return dataclasses.replace(config, **changes)


def _section(config: Any, value: Any, path: str, valid: list[str], problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        return _filled(config, value, f"{path}.", valid, problems)
    names = ", ".join(inner.name for inner in keys_of(config))
    text = f"is a section, not a single value; its keys are {names}"
    problems.append(Problem(path, value, text, code="config.section-needs-keys"))
    return config


def _value(item: Key, value: Any, path: str) -> tuple[Any, Problem | None]:
    """Return a value in the key's type, and its problem."""
    if isinstance(value, str) and value == REQUIRED:
        text = f"has no default and must be set, to {_expected(item)}"
        return None, Problem(path, value, text, doc=item.doc, code="config.required-key")
    if value == AUTO and item.accepts_auto:
        return None, None
    is_text = item.annotation in (str, list[str]) and not item.optional
    if value == AUTO and not is_text and AUTO not in item.limits.choices:  # it may be a text, or a choice
        text = f"has no auto; it must be {_expected(item)}"
        return None, Problem(path, value, text, doc=item.doc, code="config.no-auto")
    if item.is_list and isinstance(value, str | int | float):
        value = [value]
    wrong = Problem(path, value, f"must be {_expected(item)}", doc=item.doc, code="config.wrong-type")
    if isinstance(value, bool) and item.annotation is not bool:
        return None, wrong
    kind = item.annotation | None if item.optional else item.annotation
    try:
        holder = DictConfig({item.name: value}, element_type=kind)
    except OmegaConfBaseException:
        return None, wrong
    converted = cast(dict[str, Any], OmegaConf.to_container(holder))[item.name]
    complaint = item.limits.complaint(converted)
    problem = Problem(path, value, complaint, doc=item.doc, code="config.value-out-of-limits") if complaint else None
    return converted, problem


def unknown_key(path: str, value: Any, valid: list[str]) -> Problem:
    """Describe a key that the job lacks, with its name in megarl, or else the nearest keys."""
    if path in _training_keys():
        nearest = " or ".join(namesakes(path, valid))
        remedy = f"did you mean {nearest}?" if nearest else "remove it"
        text = f"is a key of training, without effect here; {remedy}"
        return Problem(path, value, text, code="config.training-key")
    nearest = " or ".join(synonyms(path, valid) or nearest_keys(path, valid))
    text = "unknown key" + (f"; did you mean {nearest}?" if nearest else "")
    return Problem(path, value, text, code="config.unknown-key")


@cache
def _training_keys() -> frozenset[str]:
    return frozenset(path for path, _ in walk(TrainConfig))


def _expected(item: Key) -> str:
    words = _TYPE_WORDS.get(item.annotation) or f"a {item.type_name.removesuffix(item.unset)}"
    limits = item.limits.describe()
    words = f"{words} ({limits})" if limits else words
    return f"{words}{item.unset}"


COMMAND_LINE, FILE, DERIVED, PLANNED = "command line", "file", "derived", "layout=auto"


class ChangedKey(NamedTuple):
    """A key whose value is not the schema's default.

    The origin is ``command line``; ``file``, the named YAML file or one of its defaults; ``layout=auto``; or
    ``derived`` from other keys, for keys that are ``auto`` in the schema.
    """

    key: str
    value: Any  # in its stored form
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
        values: the values that the configuration was built from: files and command line.
        overrides: of the command line, in Hydra's syntax.
        planned: keys that ``layout=auto`` chose.
    """
    schema: Any = type(config)
    named = {table_of(schema).current_name(text.split("=", 1)[0].lstrip("+~")) for text in overrides}
    plain: Any = OmegaConf.to_container(values) if isinstance(values, DictConfig) else values
    composed = dict(leaves(plain))
    schema_defaults, layouts = dict(leaves(defaults(schema))), tuple(inheriting_sections(schema, plain))
    changed = []
    for key, value in leaves(dataclasses.asdict(config)):
        default, stored = schema_defaults.get(key), stored_value(schema, key, value)
        if default not in (value, stored):
            origin = FILE if composed.get(key, default) != default else DERIVED
            if any(key == name or key.startswith(f"{name}.") for name in named):
                origin = COMMAND_LINE
            origin = PLANNED if key in planned else origin
            if origin != DERIVED or not key.startswith(layouts):  # an inherited key is no news
                changed.append(ChangedKey(key, stored, default, origin))
    return changed
