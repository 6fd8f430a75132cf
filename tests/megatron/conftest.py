from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import ProcessPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Up to four processes, warm for all tests that ask for them."""
    processes = ProcessPool(4)
    yield processes
    processes.close()
