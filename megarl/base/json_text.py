"""Parsing of JSON from outside: a text nested too deeply is invalid like any other malformed text."""

from __future__ import annotations

import json
from typing import Any

_DECODER = json.JSONDecoder()
_TOO_DEEP = "it is nested too deeply"


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parse JSON from a file, a model or a service.

    Args:
        text: the JSON; bytes are UTF-8, UTF-16 or UTF-32.
        options: arguments of ``json.loads``.

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
