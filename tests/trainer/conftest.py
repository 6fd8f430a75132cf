from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.task_configs import arithmetic, evaluate_config, pair_config, sft_config, train_config  # noqa: F401

from megarl.base.child_process import environment_variables
from megarl.cluster.fork_server import fork_server


@pytest.fixture(scope="session")
def forked_workers(shared_server: dict[str, str]) -> Iterator[None]:
    """The workers of jobs in this process are forks of one server."""
    with ExitStack() as stack:
        with environment_variables(shared_server):
            stack.enter_context(fork_server())
        yield
