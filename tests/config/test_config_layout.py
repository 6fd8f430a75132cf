"""``layout=auto``: the chosen values are set."""

from types import SimpleNamespace

from omegaconf import OmegaConf

from megarl.config import TrainConfig
from megarl.config.compose import ConfigRequest, compose_run


def test_chosen_values_are_set():
    def choose(build, fixed):
        assert "trainer.seed" in fixed and "critic.model.path" not in fixed
        assert build({"trainer.test_freq": 8}).trainer.test_freq == 8
        return SimpleNamespace(changes={"trainer.test_freq": 9})

    run = compose_run(ConfigRequest(TrainConfig, "quickstart", ("layout=auto", "trainer.seed=1")), choose)
    assert OmegaConf.select(run.values, "trainer.test_freq") == run.config.trainer.test_freq == 9
    assert run.layout is not None and run.layout.changes == {"trainer.test_freq": 9} and "hydra" not in run.values
