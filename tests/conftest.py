"""Processes that several rooms' tests share, and what may run side by side (``-n 2``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import ProcessPool

TESTS = Path(__file__).parent
ONE_AFTER_THE_OTHER = ("cluster", "e2e")
"""Folders whose tests start Ray, and look at what it leaves on the machine: never two of them at a time."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file's tests stay together, for they share what is slow to start."""
    for item in items if config.getoption("loadgroup", False) else ():
        folder = item.path.relative_to(TESTS).parts[0]
        group = "ray" if folder in ONE_AFTER_THE_OTHER else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Up to eight processes, started as tests ask for more of them, and warm for all that follow."""
    processes = ProcessPool(8)
    yield processes
    processes.close()
