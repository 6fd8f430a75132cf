"""Processes that several rooms' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import ProcessPool
from hypothesis import settings

# A busy machine is no failure: hypothesis would fail a test whose example takes more than 0.2 s.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Up to eight processes, started as tests ask for more of them, and warm for all that follow."""
    processes = ProcessPool(8)
    yield processes
    processes.close()
