"""Tiny models of every family, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import SETTINGS
from tiny_models import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model by its name in ``SETTINGS``."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_model(made[name], **SETTINGS[name])
        return made[name]

    return get
