from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import ProcessPool


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """Up to four processes, warm for all tests of a file."""
    processes = ProcessPool(4)
    yield processes
    processes.close()
