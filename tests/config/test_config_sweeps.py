"""Sweeps: plugins, checks before the first run, and experiments on top of configurations."""

from functools import cache
from pathlib import Path

import pytest
from support.expected_errors import raises

from megarl.config import TrainConfig
from megarl.config import sweeps as module
from megarl.config.compose import ConfigRequest, compose, compose_run, compose_sweep

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
LR = "actor_rollout_ref.actor.optim.lr"
REQUIRED = (
    "actor_rollout_ref.model.path=m",
    "data.train_files=x.parquet",
    "actor_rollout_ref.rollout.multi_turn.search.url=http://r",
    "trainer.device=cuda",
)


def sweep(*overrides, name="quickstart"):
    return [run.config for run in compose_sweep(ConfigRequest(TrainConfig, name, overrides)).runs]


def test_settings_of_a_sweep_do_not_change_its_runs():
    launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8")
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.storage=sqlite:///s.db")
    request = ConfigRequest(TrainConfig, "quickstart", (*launcher, *search, f"{LR}=1e-4,2e-4"))
    composed = compose_sweep(request)
    settings = composed.settings
    assert (settings.cluster, settings.parameters) == ("slurm", {"partition": "gpu", "gpus_per_node": 8})
    assert settings.search == module.SearchKeys(n_trials=3, storage="sqlite:///s.db")
    assert composed.runs[0].overrides == (f"{LR}=0.0001",)


def test_folders_of_a_sweep():
    folders = ("hydra.sweep.dir=out", "hydra.sweep.subdir=run_${hydra.job.num}")
    composed = compose_sweep(ConfigRequest(TrainConfig, "quickstart", (*folders, "trainer.seed=1,2")))
    assert composed.folder == Path("out")
    assert [run.folder for run in composed.runs] == [Path.cwd() / "out" / f"run_{number}" for number in (0, 1)]
    assert composed.runs[1].config.trainer.default_local_dir == str(composed.runs[1].folder / "checkpoints")
    run = compose_run(ConfigRequest(TrainConfig, "quickstart", ("hydra.run.dir=there/${trainer.seed}",)))
    assert run.folder == Path.cwd() / "there" / "1"


@pytest.mark.parametrize(
    ("overrides", "seeds"),
    [
        (("trainer.seed=range(1,7,2)",), [1, 3, 5]),
        (("trainer.seed=choice(4,2)",), [4, 2]),
        (("trainer.seed=sort(4,2)", "algorithm.lam=0.9,1"), [2, 2, 4, 4]),
    ],
)
def test_values_of_the_override_syntax(overrides, seeds):
    assert [config.trainer.seed for config in sweep(*overrides)] == seeds


@pytest.mark.parametrize(
    ("override", "value"),
    [(f"{LR}=interval(1e-5,1e-3)", 1e-5), (f"{LR}=tag(log,interval(1e-5,1e-3))", 1e-5), (f"{LR}=choice(3e-4,1)", 3e-4)],
)
def test_one_corner_of_sampled_values_is_checked(override, value):
    (config,) = sweep("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", override)
    assert config.actor_rollout_ref.actor.optim.lr == value
    with raises("config.unknown-key", "trainer.nodes"):
        sweep("hydra/sweeper=optuna", "trainer.nodes=2", override)


@pytest.mark.parametrize(
    ("override", "code", "values"),
    [
        ("hydra/launcher=joblib", "config.no-joblib", "hydra/launcher=submitit_local"),
        ("hydra/launcher=submitit_locl", "config.unknown-sweep-plugin", "submitit_local"),
        ("hydra/sweeper/sampler=grid", "config.unknown-sweep-plugin", "hydra/sweeper"),
        ("hydra.sweeper.n_trils=3", "config.unknown-key", "hydra.sweeper.n_trials"),
        ("hydra.sweeper.n_trials=0", "config.value-out-of-limits", ">= 1"),
        ("hydra.run.dir=a,b", "config.sweep-over-hydra", "one value"),
        ("+experiment=glob(no_such*)", "config.malformed-sweep", "no such value"),
        ("hydra/sweeper=ax", "config.unknown-sweep-plugin", "basic, optuna"),
        (f"{LR}=interval(1e-5,1e-3)", "config.sweep-interval", "hydra/sweeper=optuna"),
    ],
)
def test_unsupported_sweeps(override, code, values):
    with raises(code, override, values):
        sweep(override)


@pytest.mark.parametrize(
    ("override", "code", "value"),
    [
        ("hydra/launcher=submitit_local", "config.needs-multirun", "--multirun"),
        ("hydra.sweeper.n_trials=3", "config.needs-multirun", "--multirun"),
        ("hydra.run.dirr=x", "config.unknown-key", "hydra.run.dir?"),
        ("hydra.job.chdir=true", "config.unknown-key", "hydra.job.chdir"),
    ],
)
def test_keys_of_hydra_in_a_single_run(override, code, value):
    with raises(code, override, value):
        compose(ConfigRequest(TrainConfig, "quickstart", (override,)))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(module._PACKAGES["hydra/sweeper"], "optuna", "not_here_optuna")
    with raises("config.sweep-not-installed", "hydra/sweeper=optuna", "not_here_optuna", "pip install", "[sweep]"):
        sweep("hydra/sweeper=optuna")


def test_experiments_are_swept_over():
    for texts in ("rloo,gspo", "choice(rloo,gspo)", "glob([rloo,gsp*])"):
        names = {config.algorithm.adv_estimator for config in sweep(f"+experiment={texts}", name="quickstart_grpo")}
        assert names == {"rloo", "grpo"}
    rloo, gspo = sweep("+experiment=rloo,gspo", name="quickstart_grpo")
    assert rloo.algorithm.adv_estimator == "rloo" and gspo.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"


@cache
def bare(name):
    """A configuration without an experiment."""
    return compose(ConfigRequest(TrainConfig, name, required(name)))


def required(name):
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
def test_experiments_apply_to_configurations(name, experiment):
    changed = compose(ConfigRequest(TrainConfig, name, (*required(name), f"+experiment={experiment}")))
    assert changed != bare(name) and changed.trainer.experiment_name == bare(name).trainer.experiment_name


@pytest.mark.parametrize("key", ["hf_export_dir", "rollout_data_dir"])
def test_runs_of_a_sweep_share_no_folder(key):
    runs = ("trainer.seed=1,2",)
    shared = f"trainer.{key}=out"
    with raises("config.sweep-shared-output", f"trainer.{key}=out", "runs 0 and 1", f"trainer.{key}=null"):
        sweep(*runs, shared)
    assert len(sweep(*runs, "trainer.save_freq=1")) == 2  # checkpoints go to the folder of each run
    for allowed in ("trainer.overwrite_output=true", "trainer.dry_run=true"):
        assert len(sweep(*runs, shared, allowed)) == 2


def test_runs_with_sampled_values_share_no_folder():
    optuna = ("hydra/sweeper=optuna", "trainer.seed=range(1,9)")
    assert len(sweep(*optuna)) == 1
    with raises("config.sweep-shared-output", "trainer.hf_export_dir=out", "runs 0 and 1"):
        sweep(*optuna, "trainer.hf_export_dir=out")
