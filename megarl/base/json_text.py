"""Strict JSON: a text nested too deeply is invalid like any other malformed text, and no NaN is written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.base.errors import MegarlError

_DECODER = json.JSONDecoder()
_TOO_DEEP = "it is nested too deeply"
_LEVELS = 64
"""Nested levels of a file: many more than real ones have, and few enough to copy, pickle and print them."""


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parse JSON from a file, a model or a service.

    Args:
        text: the JSON; bytes are UTF-8, UTF-16 or UTF-32.

    Raises:
        ValueError: the text is not JSON, or nested more deeply than Python's recursion limit.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_json_prefix(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at an index; return it with the index of its end.

    Raises:
        ValueError: no JSON value begins there, or it is nested more deeply than Python's recursion limit.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def format_json(value: Any, **options: Any) -> str:
    """Format JSON that every parser reads: numbers that JSON lacks become the texts NaN, Infinity and -Infinity.

    Args:
        value: a JSON value, or others with the option ``default``.
    """
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def read_json_object(file: Path, error: type[MegarlError]) -> dict[str, Any]:
    """Read a JSON object from a file that another program wrote.

    Raises:
        MegarlError: the file cannot be read, is not JSON, is no object, or is nested too deeply; names it.
    """
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
        if _is_deeper(values, _LEVELS):
            raise ValueError(_TOO_DEEP)
    except OSError as problem:
        raise error(f"{file} cannot be read: {problem.strerror or problem}", code="model.unreadable-file") from None
    except ValueError as problem:
        raise error(f"{file} is not valid JSON: {problem}", code="model.malformed-json") from None
    if not isinstance(values, dict):
        raise error(f"{file} holds a {type(values).__name__}, expected a JSON object", code="model.not-json-object")
    return values


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in children)
