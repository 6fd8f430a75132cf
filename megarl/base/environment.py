"""Environment variables of this process that hold for a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in this block, for this process and those started in it; None removes a variable."""
    previous = {name: os.environ.get(name) for name in variables}
    _apply(variables)
    try:
        yield
    finally:
        _apply(previous)


def _apply(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
