"""Tests that run before a release only: ``RELEASE=1`` runs all, other runs leave out those marked ``release``.

The mark names a cheaper test in CI that shows the same property: ``@pytest.mark.release(twin="tests/...::test_name")``.
Cases of one function may have the mark, and others of it are their twins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
RELEASE = os.environ.get("RELEASE") == "1"


def of_release(cases: Sequence[T], others: Sequence[T]) -> list[T]:
    """Cases of a test; ``others`` repeat their mechanisms and run before a release."""
    return [*cases, *(others if RELEASE else ())]


def leave_out_release_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of a release, unless this is a run before one."""
    if RELEASE:
        return
    marked = [item for item in items if item.get_closest_marker("release")]
    if marked:
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if not item.get_closest_marker("release")]
