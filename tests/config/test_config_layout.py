"""``layout=auto``: the chosen values are set, with Hydra's section and, in a run of a sweep, without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf, open_dict

from megarl.config import TrainConfig
from megarl.config.compose import Changes, ConfigRequest, compose_run, fill_layout


@pytest.mark.parametrize("with_hydra", [True, False])
def test_chosen_values_are_set(with_hydra: bool) -> None:
    values = compose_run(ConfigRequest(TrainConfig, "quickstart")).values
    if not with_hydra:
        with open_dict(values):
            del values["hydra"]

    def choose(build: Callable[[Changes], Any], fixed: frozenset[str]) -> Changes:
        assert fixed == {"trainer.seed"} and build({"trainer.seed": 8}).trainer.seed == 8
        return {"trainer.seed": 9}

    fill_layout(TrainConfig, values, choose, frozenset({"trainer.seed"}))
    assert OmegaConf.select(values, "trainer.seed") == 9 and ("hydra" in values) == with_hydra
