"""Check `megatron.override_transformer_config` against the installed Megatron-Core's ``TransformerConfig``.

:mod:`megarl.config.checks.transformer_field_table` classifies the fields. Names, types and defaults of the installed
release are read from its source: importing Megatron takes seconds and needs GPU libraries, and a misspelt name
should be an error at once.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.checks.transformer_field_table import (
    BALANCE_RATES,
    BALANCING_TYPES,
    OWNED,
    REJECTED,
    REJECTED_VALUES,
    SUPPORTED,
)
from megarl.config.problems import Problem, format_value

_SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
_BALANCING = "moe_router_load_balancing_type"
_ENUMS, _BACKENDS = "transformer/enums.py", "AttnBackend"


class TransformerField(NamedTuple):
    """A field of Megatron-Core's ``TransformerConfig``, as written in its source.

    Attributes:
        annotation: its type.
        default: its default; None if the source has none.
    """

    annotation: ast.expr
    default: ast.expr | None


def override_problems(overrides: Mapping[str, Any], *, trains: bool = True) -> Iterator[Problem]:
    """Find fields that cannot be set, by path in the role's section; a role that does not train ignores losses."""
    fields = transformer_fields() if overrides else {}
    for name, value in overrides.items():
        path = f"override_transformer_config.{name}"
        if problem := _problem(name, path, value, fields):
            yield problem
        elif name == "moe_aux_loss_coeff" and trains and value and overrides.get(_BALANCING) != "seq_aux_loss":
            text = f"needs {_BALANCING}=seq_aux_loss"
            yield Problem(path, value, text, code="config.transformer-field-without-effect")


def _problem(name: str, path: str, value: Any, fields: Mapping[str, TransformerField]) -> Problem | None:
    """The problem of a field that cannot have a value."""
    if name in OWNED:
        return Problem(path, value, f"cannot be set: {OWNED[name]}", code="config.owned-transformer-field")
    if not fields:
        return None
    if name not in fields:
        near = difflib.get_close_matches(name, sorted(SUPPORTED & fields.keys()), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        text = f"the installed Megatron-Core's TransformerConfig has no such field{hint}"
        return Problem(path, value, text, code="config.unknown-transformer-field")
    field = fields[name]
    if name in SUPPORTED:
        reason = REJECTED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
        text = f"cannot be {format_value(value)}: that {reason}" if reason else f"must be {_describe(name, field)}"
        is_wrong = reason or not _fits(name, field, value)
        return Problem(path, value, text, code="config.transformer-field-value") if is_wrong else None
    if _is_default(field, value):
        return None
    reason = REJECTED.get(name, "megarl does not know this field of the installed Megatron-Core; remove the key")
    return Problem(path, value, f"is not supported: {reason}", code="config.unsupported-transformer-field")


def _is_default(field: TransformerField, value: Any) -> bool:
    """Whether a value is Megatron's own, as far as the source spells it out."""
    default = field.default
    if isinstance(default, ast.Call):  # dataclasses.field(default=..., metadata=...)
        default = next((keyword.value for keyword in default.keywords if keyword.arg == "default"), None)
    return isinstance(default, ast.Constant) and type(default.value) is type(value) and default.value == value


@cache
def transformer_fields() -> dict[str, TransformerField]:
    """The fields by name; empty without Megatron-Core."""
    fields: dict[str, TransformerField] = {}
    for file, name in _SOURCES:
        fields |= {
            node.target.id: TransformerField(node.annotation, node.value)
            for node in _class_body(file, name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return fields


@cache
def attention_backends() -> tuple[str, ...]:
    """Names of Megatron's attention backends."""
    body = (node for node in _class_body(_ENUMS, _BACKENDS) if isinstance(node, ast.Assign))
    return tuple(target.id for node in body for target in node.targets if isinstance(target, ast.Name))


def _class_body(file: str, name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec("megatron")
    folders = (spec.submodule_search_locations or []) if spec else []
    for source in (Path(folder) / "core" / file for folder in folders):
        if source.is_file():
            tree = ast.parse(source.read_text(encoding="utf-8"))
            return next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return []


def _fits(name: str, field: TransformerField, value: Any) -> bool:
    """Whether a value has the type of a supported field."""
    if name in BALANCE_RATES:
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if name == _BALANCING:
        return value in BALANCING_TYPES
    return value in attention_backends() if ast.unparse(field.annotation) == _BACKENDS else isinstance(value, bool)


def _describe(name: str, field: TransformerField) -> str:
    if name in BALANCE_RATES:
        return "a number of at least 0"
    if name == _BALANCING:
        return f"one of {', '.join(BALANCING_TYPES)}"
    text = ast.unparse(field.annotation)
    if text != _BACKENDS:
        return text
    refused = REJECTED_VALUES["attention_backend"]
    return f"one of {', '.join(name for name in attention_backends() if name not in refused)}"
