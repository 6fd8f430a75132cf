"""Declaration of configuration keys: default, documentation and limits in one place, and access by dotted path.

The declarations feed the typed conversion, the error messages and the pages of ``docs/reference/config/``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

from omegaconf import MISSING

REQUIRED: Any = MISSING
"""Default of a key that the user has to set."""
AUTO = "auto"
"""Value of a key that follows other keys; None in the typed configuration until it is derived."""

_Config = TypeVar("_Config")


class KeyLimits(NamedTuple):
    """Range, choices and length of a key's value, beyond its type."""

    choices: tuple[str, ...] = ()
    custom: str = ""  # besides the choices, "path.py:function" or "package.module.function"; or ...:class
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    length: int | None = None
    allowed: tuple[int, ...] = ()  # special values outside the range, such as -1
    empty: bool = False  # whether a text may be empty

    def complaint(self, value: Any) -> str | None:
        """Return the violated limit of a value of the right type, as "must be ...", or None."""
        if value is None:
            return None
        if isinstance(value, list | tuple):
            if self.length is not None and len(value) != self.length:
                return f"must have {self.length} entries"
            return next((text for text in map(self.complaint, value) if text), None)
        if isinstance(value, str):
            if not value.strip() and not self.empty:
                return "must not be empty; give a value, or leave the key out"
            is_custom = self.custom and (":" in value or "." in value)
            return (
                f"must be {self.describe()}" if self.choices and value not in self.choices and not is_custom else None
            )
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._in_range(value):
            return f"must be {self.describe() or 'a finite number'}"
        return None

    def _in_range(self, value: float) -> bool:
        if value in self.allowed:
            return True
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )

    def describe(self) -> str:
        """Describe the limits in words, such as ``> 0 and <= 1``; empty without limits."""
        if self.choices:
            words = ", ".join(self.choices)
            custom = f", or your own as path.py:{self.custom} or package.module.{self.custom}" if self.custom else ""
            return f"one of {words}{custom}"
        parts = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", self.at_least), (">", self.above), ("<=", self.at_most))
            if bound is not None
        ]
        text = " and ".join(parts)
        if self.allowed:
            text = " or ".join([", ".join(map(str, self.allowed)), *([text] if text else [])])
        return text


class Key(NamedTuple):
    """One declared key or section of a configuration class."""

    name: str
    annotation: Any  # the resolved type, without None
    optional: bool
    default: Any
    doc: str = ""
    limits: KeyLimits = KeyLimits()
    auto: bool = False  # the value follows other keys by default, and is None until it is derived
    inherits: bool = False  # the value of another section is the default; for a section, of all its keys

    @property
    def accepts_auto(self) -> bool:
        """Whether users may write ``auto``, which then is the default."""
        return (self.auto or self.inherits) and self.section is None

    @property
    def shown_default(self) -> Any:
        """The default as users write it."""
        return AUTO if self.accepts_auto else self.default

    def _of_section(self, inner: Key) -> Key:
        """A key of this section, which inherits if the section does."""
        return inner._replace(inherits=True) if self.inherits else inner

    @property
    def section(self) -> type | None:
        """The dataclass of a section; None for a key with a value."""
        is_section = isinstance(self.annotation, type) and dataclasses.is_dataclass(self.annotation)
        return self.annotation if is_section else None

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return typing.get_origin(self.annotation) is list

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a free dictionary, whose keys the schema does not know."""
        return typing.get_origin(self.annotation) is dict

    @property
    def entry(self) -> type | None:
        """The dataclass of a mapping's values, which are sections with free names; None for any other key."""
        value = typing.get_args(self.annotation)[1] if self.is_mapping else None
        return value if isinstance(value, type) and dataclasses.is_dataclass(value) else None

    @property
    def type_name(self) -> str:
        """The type in the words of the reference, such as ``int or null`` or ``int or auto``."""
        name = getattr(self.annotation, "__name__", str(self.annotation))
        if self.is_list:
            (item,) = typing.get_args(self.annotation)
            name = f"list of {item.__name__}"
        elif self.entry is not None:
            name = "sections by name"
        elif self.is_mapping:
            name = "mapping"
        elif self.section is not None:
            name = "section"
        return f"{name}{self.unset}"

    @property
    def unset(self) -> str:
        """The value without a setting, as the end of a sentence: `` or auto``, `` or null``, or nothing."""
        if self.accepts_auto:
            return f" or {AUTO}"
        return " or null" if self.optional else ""


def key(default: Any, doc: str, **limits: Any) -> Any:
    """Declare one key of a configuration dataclass.

    Args:
        default: the value of an unset key; ``REQUIRED`` without a sensible one. ``derived_key`` declares ``auto``.
        doc: meaning of the key, with its unit.
        limits: fields of :class:`KeyLimits`.
    """
    metadata = {"doc": doc, "limits": KeyLimits(**limits)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived_key(doc: str, **limits: Any) -> Any:
    """Declare a :func:`key` whose default is ``auto``: ``doc`` says what. The field is None until it is derived."""
    return dataclasses.field(default=None, metadata={"doc": doc, "limits": KeyLimits(**limits), "auto": True})


def section(factory: Any, doc: str = "", *, inherits: bool = False, **overrides: Any) -> Any:
    """Declare a nested section.

    Args:
        factory: its class; None for an optional section that is absent by default.
        doc: meaning of the section, beyond that of its class.
        inherits: whether all its keys are ``auto``, the values of another section (:mod:`megarl.config.derived`).
        overrides: defaults that differ from those of the class.
    """
    make = (lambda: None) if factory is None else lambda: factory(**overrides)
    return dataclasses.field(default_factory=make, metadata={"doc": doc, "inherits": inherits})


def keys_of(schema: Any) -> Sequence[Key]:
    """Return the declared keys of a configuration class, or of an instance, whose values then count as defaults."""
    cls: Hashable = schema if isinstance(schema, type) else type(schema)
    keys = _keys_of_class(cls)
    return keys if cls is schema else [item._replace(default=getattr(schema, item.name)) for item in keys]


@cache
def _keys_of_class(cls: Any) -> tuple[Key, ...]:
    instance, hints = cls(), typing.get_type_hints(cls)
    keys = []
    for item in dataclasses.fields(cls):
        annotation, optional = _without_none(hints[item.name])
        keys.append(Key(item.name, annotation, optional, getattr(instance, item.name), **item.metadata))
    return tuple(keys)


def walk(schema: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Iterate over all keys of a configuration class with their dotted paths; a section precedes its keys.

    Sections with free names have paths only in an instance.
    """
    return iter(_keys_below(schema)) if isinstance(schema, type) and not prefix else _walk(schema, prefix)


@cache
def _keys_below(schema: type) -> tuple[tuple[str, Key], ...]:
    """The keys of a class, which a search for a layout asks for hundreds of times."""
    return tuple(_walk(schema, ""))


def _walk(schema: Any, prefix: str) -> Iterator[tuple[str, Key]]:
    for item in keys_of(schema):
        path = f"{prefix}.{item.name}" if prefix else item.name
        yield path, item
        if item.section is not None:
            inner_keys = walk(item.section if item.default is None else item.default, path)
            yield from ((inner, item._of_section(key)) for inner, key in inner_keys)
        elif item.entry is not None:
            for name, entry in item.default.items():
                yield from walk(entry, f"{path}.{name}")


def key_at(schema: type, path: str) -> Key:
    """Return the declaration of a key, also inside sections with free names.

    Raises:
        KeyError: no such key.
    """
    name, _, rest = path.partition(".")
    item = {item.name: item for item in keys_of(schema)}[name]
    if not rest:
        return item
    if item.entry is not None:
        return key_at(item.entry, rest.partition(".")[2])
    if item.section is None:
        raise KeyError(path)
    return item._of_section(key_at(item.section, rest))


def find_key(schema: type, path: str) -> Key | None:
    """Return the declaration of a key as :func:`key_at`, or None without such a key."""
    try:
        return key_at(schema, path)
    except KeyError:
        return None


def value_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a typed configuration, for paths that are data; code reads attributes.

    Raises:
        AttributeError: no such key.
    """
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def parents(path: str) -> list[str]:
    """List the sections that a dotted path leads through, from the outermost."""
    return [path[:at] for at, letter in enumerate(path) if letter == "."]


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every key of nested mappings; an empty mapping is a value."""
    for name, inner in values.items():
        path = f"{prefix}{name}"
        if isinstance(inner, Mapping) and inner:
            yield from leaves(inner, f"{path}.")
        else:
            yield path, inner


def lookup(values: Any, path: str) -> Any:
    """Return the value at a dotted path of nested plain values; None without one."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def with_values(config: _Config, values: Mapping[str, Any]) -> _Config:
    """Return a copy of a configuration with other values, by dotted path."""
    result: Any = config
    for path, value in values.items():
        result = _with_value(result, path.split("."), value)
    return cast(_Config, result)


def _with_value(node: Any, names: Sequence[str], value: Any) -> Any:
    name, *rest = names
    if isinstance(node, dict):
        return {**node, name: _with_value(node[name], rest, value) if rest else value}
    return dataclasses.replace(node, **{name: _with_value(getattr(node, name), rest, value) if rest else value})


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(arguments) != 1:
            raise TypeError(f"a configuration key has one type, optionally with None, not {annotation}")
        return arguments[0], True
    return annotation, False
