"""The plan's bytes beside those of the real engine on a CPU: states to the byte, activations within ten per cent."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import ProcessPool
from engine_memory import Measured, measure
from memory_cases import CASES, MODELS, ROWS, expected
from tiny_models import save_model

ACTIVATIONS = 0.1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, settings in MODELS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        save_model(paths[name], **settings)
    return paths


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_engine(pool: ProcessPool, models: dict[str, Path], name: str) -> None:
    case = CASES[name]
    path = models[case.model]
    found: list[Measured] = pool.run(measure, case.setup.layout.world_size, path, case.setup, ROWS)
    for rank, real in enumerate(found):
        plan = expected(path, case.setup, ROWS, rank)
        assert plan[:5] == real[:5], f"rank {rank}: {plan._fields[:5]}"
        assert plan.saved == pytest.approx(real.saved, rel=ACTIVATIONS), f"rank {rank}: {real.at_peak}"
