"""Processes that several rooms' tests share, and what may run side by side (``-n 2``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import ProcessPool

TESTS = Path(__file__).parent
ONE_AFTER_THE_OTHER = ("cluster", "e2e", "launch")
"""Folders whose tests start Ray, and look at what it leaves on the machine: never two of them at a time."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one lane, for they share what is slow to start."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "ray" if set(ONE_AFTER_THE_OTHER) & set(file.split("/")) else file

    return Lanes(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Up to eight processes, started as tests ask for more of them, and warm for all that follow."""
    processes = ProcessPool(8)
    yield processes
    processes.close()
