"""Warm processes, models and a batch for all tests of the room."""

from __future__ import annotations

import pytest
from support.distributed import ProcessPool
from tiny_policies import Models, save_model, training_batch


@pytest.fixture(scope="session")
def role_pool(pool: ProcessPool) -> ProcessPool:
    return pool


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    policy, critic = save_model(folder / "policy"), save_model(folder / "critic", critic=True)
    return Models(folder / "policy", folder / "critic", policy, critic, training_batch(policy, critic))
