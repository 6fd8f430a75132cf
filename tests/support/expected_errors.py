"""Expected errors of megarl, by code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.base.errors import MegarlError


@contextmanager
def raises(
    code: str, *values: object, error: type[MegarlError] = MegarlError
) -> Iterator[pytest.ExceptionInfo[MegarlError]]:
    """Expect an error with this code whose text has each value, such as a key, a path or a number."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, repr(caught.value)
    absent = [value for value in values if str(value) not in caught.value.text]
    assert not absent, f"not in the message: {absent}\n{caught.value.text}"
