from __future__ import annotations

from collections.abc import Iterator

import pytest
from task_configs import arithmetic, evaluate_config, pair_config, sft_config, train_config  # noqa: F401

from megarl.cluster.fork_server import fork_server


@pytest.fixture(scope="session")
def forked_workers() -> Iterator[None]:
    """The workers of jobs in this process are forks of one server."""
    with fork_server():
        yield
