"""Sweeps from the command line: values from Optuna, and processes of submitit."""

import json

import pytest
import yaml
from support.warm_drivers import write_interpreter

LR = "actor_rollout_ref.actor.optim.lr"
TINY = ("trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1")
SMALL = (*TINY, "critic.megatron.data_parallel_size=1", "trainer.total_training_steps=1", "trainer.test_freq=-1")


def sweep_results(run):
    """Folder of the sweep and the runs in ``sweep.json``."""
    (file,) = run.folder.glob("outputs/quickstart/*/sweep.json")
    return file.parent, json.loads(file.read_text(encoding="utf-8"))["runs"]


@pytest.mark.release(twin="tests/test_cli.py::test_optuna_ignores_failed_trials")
def test_optuna_sweep(small, start):
    run = start(
        *("--config-name", "quickstart", "-m", *small, *SMALL, "trainer.val_before_train=false"),
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=1"),
        "trainer.sweep_metric=actor/grad_norm",
        f"{LR}=tag(log,interval(1e-5,1e-3))",
    )
    assert run.wait(600) == 0, run.output
    folder, results = sweep_results(run)
    assert len({result["overrides"][LR] for result in results}) == 2
    for result in results:
        rows = [
            json.loads(line)
            for line in (folder / result["folder"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert result["value"] == rows[-1]["actor/grad_norm"] and result["error"] is None
        config = yaml.safe_load((folder / result["folder"] / "config.yaml").read_text(encoding="utf-8"))
        assert config["actor_rollout_ref"]["actor"]["optim"]["lr"] == float(result["overrides"][LR])
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text(encoding="utf-8"))
    assert best["best_value"] == max(result["value"] for result in results)  # Optuna minimizes by default
    assert (folder / "comparison.html").is_file() and "<- best" in run.output


def test_submitit_sweep_reports_failed_runs(small, start, drivers, tmp_path):
    python = write_interpreter(tmp_path / "python", drivers.address, "submitit.core._submit")
    run = start(
        *("--config-name", "quickstart", "-m", *small, *SMALL, "trainer.dry_run=true", "hydra/launcher=submitit_local"),
        "reward.name=arithmetic,no.such.reward",
        env={"WARM_PYTHON": str(python)},
        warm=True,
    )
    assert run.wait(600) == 1, run.output
    folder, (fine, failed) = sweep_results(run)
    assert fine["error"] is None and fine["value"] is None  # a dry run has no score
    assert failed["error"].endswith("rewards [config.dry-run-failed]")
    assert failed["overrides"]["reward.name"] == "no.such.reward"
    logs = list((folder / ".submitit").rglob("*.out"))
    assert len(logs) == 2 and any("dry run: every part is fine" in log.read_text(encoding="utf-8") for log in logs)
