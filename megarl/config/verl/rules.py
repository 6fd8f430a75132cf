"""Kinds of rules for verl's keys that megarl's schema lacks: translate, accept at certain values, or refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Only:
    """Accepted at the values that describe megarl's behaviour, and at null; other values are refused."""

    values: tuple[Any, ...]
    why: str  # megarl's behaviour, or its alternative to other values


@dataclass(frozen=True)
class NoEffect:
    """Accepted at every value, since it cannot change the results of megarl; noted once per run."""

    why: str
    unless: str = ""  # name of a key of the same section with which it has its effect; empty = none


@dataclass(frozen=True)
class Renamed:
    """Translated to megarl's name for the same setting; noted once per run."""

    to: str  # megarl's key
    values: Mapping[Any, Any] = field(default_factory=dict)  # those that megarl writes differently
    left_out: tuple[Any, ...] = ()  # values that need no setting in megarl
    why: str = ""  # difference in meaning, if any
    switch: str = ""  # key at whose values `off` the setting does nothing; empty = none
    off: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Feature:
    """Part of a section that does nothing while its switch is off; refused if it is on."""

    switch: str  # key that turns the section on
    off: tuple[Any, ...]  # values of the switch at which the section does nothing
    why: str  # megarl's alternative


@dataclass(frozen=True)
class Refused:
    """Refused by name; megarl has no such setting."""

    why: str


@dataclass(frozen=True)
class OtherBackend:
    """Concerns a backend of verl that megarl lacks."""

    name: str
    nearest: str = ""  # the closest setting of megarl, if any

    @property
    def why(self) -> str:
        """The reason for the refusal."""
        text = f"concerns {self.name} only, and megarl trains with Megatron and generates with SGLang"
        return f"{text}; {self.nearest}" if self.nearest else f"{text}; remove the key"


@dataclass(frozen=True)
class PoolSwitch:
    """Turns a role's own devices on or off; in megarl they are on if the role has nodes."""

    section: str  # of the role, with `nnodes` and `n_gpus_per_node`

    @property
    def why(self) -> str:
        """The meaning in megarl."""
        return f"false sets `{self.section}.nnodes=0`; true needs `nnodes`"


Rule: TypeAlias = Only | NoEffect | Renamed | Feature | PoolSwitch | Refused | OtherBackend


@dataclass(frozen=True)
class Values:
    """A key of both, with values of verl that megarl writes differently or lacks."""

    meanings: Mapping[Any, Any] = field(default_factory=dict)  # megarl's value by verl's
    refused: Mapping[Any, str] = field(default_factory=dict)  # reason by refused value
