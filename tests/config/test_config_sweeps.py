"""Sweeps' command lines: plugins, what is checked before the first run, and experiments to lay over configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import TrainConfig
from megarl.config import sweeps as home
from megarl.config.compose import Request, compose, compose_sweep
from megarl.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
LR = "actor_rollout_ref.actor.optim.lr"
GIVEN = (
    "actor_rollout_ref.model.path=m",
    "data.train_files=x.parquet",
    "retriever.url=http://r",
    "trainer.device=cuda",
)


def sweep(*overrides: str, name: str = "quickstart") -> list[TrainConfig]:
    return compose_sweep(Request(TrainConfig, name, overrides, multirun=True))


def test_launchers_leave_the_runs_as_they_are() -> None:
    configs = sweep("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"{LR}=1e-4,2e-4")
    assert [config.actor_rollout_ref.actor.optim.lr for config in configs] == [1e-4, 2e-4]


@pytest.mark.parametrize(
    ("override", "value"),
    [(f"{LR}=interval(1e-5,1e-3)", 1e-5), (f"{LR}=tag(log,interval(1e-5,1e-3))", 1e-5), (f"{LR}=choice(3e-4,1)", 3e-4)],
)
def test_of_drawn_values_a_corner_is_checked(override: str, value: float) -> None:
    (config,) = sweep("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", override)
    assert config.actor_rollout_ref.actor.optim.lr == value
    with pytest.raises(ConfigError, match=r"trainer\.nodes"):
        sweep("hydra/sweeper=optuna", "trainer.nodes=2", override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("hydra/launcher=joblob",), "did you mean joblib"),
        (("hydra/sweeper=ax",), "there are basic, optuna"),
        ((f"{LR}=interval(1e-5,1e-3)",), "by hydra/sweeper=optuna only"),
    ],
)
def test_what_no_sweep_can_do(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(*overrides)


def test_a_single_run_has_no_launcher() -> None:
    with pytest.raises(ConfigError, match="add --multirun"):
        compose(Request(TrainConfig, "quickstart", ("hydra/launcher=joblib",)))


def test_a_plugin_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"hydra/sweeper": {"optuna": "hydra_plugins.not_here_sweeper"}}
    monkeypatch.setattr(home, "PLUGINS", absent)
    with pytest.raises(ConfigError, match=r"not-here-sweeper is not installed; pip install 'megarl\[sweep\]'"):
        sweep("hydra/sweeper=optuna")


def test_every_plugin_that_is_named_is_here() -> None:
    modules = {module for known in home.PLUGINS.values() for module in known.values() if module}
    assert all(map(home._is_installed, modules)) and len(modules) == 3


def test_experiments_are_swept_over() -> None:
    rloo, gspo = sweep("+experiment=rloo,gspo", name="quickstart_grpo")
    assert rloo.algorithm.adv_estimator == "rloo" and gspo.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("name", ["quickstart", "quickstart_grpo", "ppo", "grpo", "run_8b_grpo", "run_70b_ppo"])
def test_experiments_fit_configurations(name: str, experiment: str) -> None:
    given = () if name.startswith("quickstart") else GIVEN
    bare = compose(Request(TrainConfig, name, given))
    changed = compose(Request(TrainConfig, name, (*given, f"+experiment={experiment}")))
    assert changed != bare and changed.trainer.experiment_name == bare.trainer.experiment_name
