"""How a configuration key is declared: its default, its documentation and its limits, in one place.

The declarations feed the typed conversion, the error messages and the generated reference in ``docs/config.md``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from omegaconf import MISSING

REQUIRED: Any = MISSING
"""Default of a key that the user has to set."""

_META = "megarl"


class Limits(NamedTuple):
    """What a value has to satisfy beyond its type."""

    choices: tuple[str, ...] = ()
    custom: str = ""  # besides the choices, "path.py:function" or "package.module.function"; or ...:class
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    length: int | None = None
    allowed: tuple[int, ...] = ()  # values outside the range that have a meaning of their own, such as -1

    def complaint(self, value: Any) -> str | None:
        """What is wrong with a value of the right type, as "must be ...", or None."""
        if value is None:
            return None
        if isinstance(value, list | tuple):
            if self.length is not None and len(value) != self.length:
                return f"must have {self.length} entries"
            return next((c for c in map(self.complaint, value) if c), None)
        if isinstance(value, str):
            return self._choice_complaint(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._in_range(value):
            return f"must be {self.describe() or 'a finite number'}"
        return None

    def _choice_complaint(self, value: str) -> str | None:
        if not self.choices or value in self.choices or (self.custom and (":" in value or "." in value)):
            return None
        return f"must be {self.describe()}"

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
        """The limits in words, such as ``> 0 and <= 1``; empty where there are none."""
        if self.choices:
            words = ", ".join(self.choices)
            own = f", or your own as path.py:{self.custom} or package.module.{self.custom}" if self.custom else ""
            return f"one of {words}{own}"
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
    doc: str
    limits: Limits

    @property
    def section(self) -> type | None:
        """The dataclass behind this key where it is a section, else None."""
        return (
            self.annotation if isinstance(self.annotation, type) and dataclasses.is_dataclass(self.annotation) else None
        )

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return typing.get_origin(self.annotation) is list

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a free dictionary, whose keys belong to someone else."""
        return typing.get_origin(self.annotation) is dict

    @property
    def type_name(self) -> str:
        """The type in the words of the reference, such as ``int or null``."""
        name = getattr(self.annotation, "__name__", str(self.annotation))
        if self.is_list:
            (item,) = typing.get_args(self.annotation)
            name = f"list of {item.__name__}"
        elif self.is_mapping:
            name = "mapping"
        elif self.section is not None:
            name = "section"
        return f"{name} or null" if self.optional else name


def key(default: Any, doc: str, **limits: Any) -> Any:
    """Declares one key of a configuration dataclass.

    Args:
        default: the value where the user sets none; ``REQUIRED`` where there is no sensible one.
        doc: what the key means, with its unit.
        limits: fields of :class:`Limits`.
    """
    metadata = {_META: (doc, Limits(**limits))}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(factory: Any, doc: str = "", **overrides: Any) -> Any:
    """Declares a nested section; ``overrides`` replace defaults of the section's own class."""
    if factory is None:
        return dataclasses.field(default=None, metadata={_META: (doc, Limits())})
    return dataclasses.field(default_factory=lambda: factory(**overrides), metadata={_META: (doc, Limits())})


def keys_of(schema: Any) -> Sequence[Key]:
    """The declared keys of a configuration class, or of an instance of it (its values are the defaults).

    Args:
        schema: a dataclass, or an instance of one.
    """
    cls = schema if isinstance(schema, type) else type(schema)
    instance = schema() if isinstance(schema, type) else schema
    hints = typing.get_type_hints(cls)
    found = []
    for item in dataclasses.fields(cls):
        annotation, optional = _without_none(hints[item.name])
        doc, limits = item.metadata.get(_META, ("", Limits()))
        found.append(Key(item.name, annotation, optional, getattr(instance, item.name), doc, limits))
    return found


def walk(schema: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """All keys below a configuration class, each with its dotted path; a section comes before what it holds."""
    for item in keys_of(schema):
        path = f"{prefix}.{item.name}" if prefix else item.name
        yield path, item
        if item.section is not None:
            yield from walk(item.section if item.default is None else item.default, path)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(arguments) != 1:
            raise TypeError(f"a configuration key has one type, optionally with None, not {annotation}")
        return arguments[0], True
    return annotation, False
