"""Sweeps: plugins, checks before the first run, and experiments on top of configurations."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from expected_errors import raises

from megarl.base.packages import is_installed
from megarl.config import TrainConfig
from megarl.config import sweeps as module
from megarl.config.compose import ConfigRequest, compose, compose_sweep

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
LR = "actor_rollout_ref.actor.optim.lr"
REQUIRED = (
    "actor_rollout_ref.model.path=m",
    "data.train_files=x.parquet",
    "actor_rollout_ref.rollout.multi_turn.search.url=http://r",
    "trainer.device=cuda",
)


def sweep(*overrides: str, name: str = "quickstart") -> list[TrainConfig]:
    return compose_sweep(ConfigRequest(TrainConfig, name, overrides, multirun=True))


def test_launchers_leave_the_runs_as_they_are() -> None:
    configs = sweep("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"{LR}=1e-4,2e-4")
    assert [config.actor_rollout_ref.actor.optim.lr for config in configs] == [1e-4, 2e-4]


@pytest.mark.parametrize(
    ("override", "value"),
    [(f"{LR}=interval(1e-5,1e-3)", 1e-5), (f"{LR}=tag(log,interval(1e-5,1e-3))", 1e-5), (f"{LR}=choice(3e-4,1)", 3e-4)],
)
def test_one_corner_of_sampled_values_is_checked(override: str, value: float) -> None:
    (config,) = sweep("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", override)
    assert config.actor_rollout_ref.actor.optim.lr == value
    with raises("config.unknown-key", "trainer.nodes"):
        sweep("hydra/sweeper=optuna", "trainer.nodes=2", override)


@pytest.mark.parametrize(
    ("override", "code", "values"),
    [
        ("hydra/launcher=joblob", "config.unknown-sweep-plugin", "joblib?"),
        ("hydra/sweeper=ax", "config.unknown-sweep-plugin", "basic, optuna"),
        (f"{LR}=interval(1e-5,1e-3)", "config.sweep-interval", "hydra/sweeper=optuna"),
    ],
)
def test_unsupported_sweeps(override: str, code: str, values: str) -> None:
    with raises(code, override, values):
        sweep(override)


def test_a_single_run_has_no_launcher() -> None:
    with raises("config.needs-multirun", "hydra/launcher=joblib", "--multirun"):
        compose(ConfigRequest(TrainConfig, "quickstart", ("hydra/launcher=joblib",)))


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"hydra/sweeper": {"optuna": "hydra_plugins.not_here_sweeper"}}
    monkeypatch.setattr(module, "PLUGINS", absent)
    with raises("config.sweep-not-installed", "hydra/sweeper=optuna", "not-here-sweeper", "pip install", "[sweep]"):
        sweep("hydra/sweeper=optuna")


def test_every_known_plugin_is_installed() -> None:
    names = {name for plugins in module.PLUGINS.values() for name in plugins.values() if name}
    assert all(map(is_installed, names)) and len(names) == 3


def test_experiments_are_swept_over() -> None:
    rloo, gspo = sweep("+experiment=rloo,gspo", name="quickstart_grpo")
    assert rloo.algorithm.adv_estimator == "rloo" and gspo.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"


@cache
def bare(name: str) -> TrainConfig:
    """A configuration without an experiment."""
    return compose(ConfigRequest(TrainConfig, name, required(name)))


def required(name: str) -> tuple[str, ...]:
    return () if name.startswith("quickstart") else REQUIRED


NAMES = ("quickstart", "quickstart_grpo", "ppo", "grpo", "run_8b_grpo", "run_70b_ppo")


@pytest.mark.parametrize(
    ("name", "experiment"),
    # Each experiment with each kind of configuration, each configuration with an experiment.
    [
        *((name, experiment) for name in ("quickstart", "run_8b_grpo") for experiment in EXPERIMENTS),
        *((name, EXPERIMENTS[0]) for name in NAMES if name not in ("quickstart", "run_8b_grpo")),
    ],
)
def test_experiments_apply_to_configurations(name: str, experiment: str) -> None:
    changed = compose(ConfigRequest(TrainConfig, name, (*required(name), f"+experiment={experiment}")))
    assert changed != bare(name) and changed.trainer.experiment_name == bare(name).trainer.experiment_name


@pytest.mark.parametrize("key", ["hf_export_dir", "rollout_data_dir"])
def test_runs_of_a_sweep_share_no_folder(key: str) -> None:
    runs = ("trainer.seed=1,2",)
    shared = f"trainer.{key}=out"
    with raises("config.sweep-shared-output", f"trainer.{key}=out", "runs 0 and 1", f"trainer.{key}=null"):
        sweep(*runs, shared)
    assert len(sweep(*runs, "trainer.save_freq=1")) == 2  # checkpoints go to the folder of each run
    for allowed in ("trainer.overwrite_output=true", "trainer.dry_run=true"):
        assert len(sweep(*runs, shared, allowed)) == 2


def test_runs_with_sampled_values_share_no_folder() -> None:
    optuna = ("hydra/sweeper=optuna", "trainer.seed=range(1,9)")
    assert len(sweep(*optuna)) == 1
    with raises("config.sweep-shared-output", "trainer.hf_export_dir=out", "runs 0 and 1"):
        sweep(*optuna, "trainer.hf_export_dir=out")
