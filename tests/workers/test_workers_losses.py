"""An update with each policy loss gives the metrics and weights of a plain loop over tokens, in any layout."""

import dataclasses

import pytest
import torch
from loss_cases import (
    BOUNDS,
    CAP,
    CLIP_SHARE,
    DIVERGENCE_BOUNDS,
    FORMULAS,
    HIGH,
    KL_COEF,
    KL_SHARE,
    LOW,
    M2_THRESHOLD,
    loss_tokens,
)
from role_processes import BUDGETS, LAYOUTS, MINI_BATCH_ROWS, Role, actor_arguments, update_plan
from safetensors.torch import load_file
from support.release import of_release
from tiny_policies import load_model, train

from megarl.algorithms import POLICY_LOSSES
from megarl.config import ActorConfig
from megarl.config.schema.roles import PolicyLossConfig
from megarl.workers.actor import ActorWorker

WHOLE = ("gspo", "geo_mean", "clip_cov", "kl_cov", "topr", "m2po")  # those that look beyond a token
NAMES = {"tp1": list(FORMULAS), **{layout: WHOLE for layout in LAYOUTS if layout != "tp1"}}
UNEVEN = [[0, 1, 2, 4], [3, 5, 6, 7]]  # three rows of the first mini-batch on one rank, one of the second


def configured(name):
    low, high = DIVERGENCE_BOUNDS if name.startswith("dppo") else (LOW, HIGH)
    return ActorConfig(
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=CAP,
        policy_loss=PolicyLossConfig(
            loss_mode=name,
            clip_cov_ratio=CLIP_SHARE,
            clip_cov_lb=BOUNDS[0],
            clip_cov_ub=BOUNDS[1],
            kl_cov_ratio=KL_SHARE,
            ppo_kl_coef=KL_COEF,
            m2_threshold=M2_THRESHOLD,
        ),
    )


@pytest.fixture(scope="module")
def reference(models):
    """Results of two mini-batches by plain loops, by loss."""
    return {
        name: train(
            load_model(models.policy_path),
            models.batch,
            loss_tokens(name, models.batch),
            POLICY_LOSSES[name].aggregation,
            MINI_BATCH_ROWS,
        )
        for name in FORMULAS
    }


def test_loops_cover_every_policy_loss():
    """test_workers_update covers PPO's loss; gpg equals reinforce."""
    assert {*FORMULAS, "vanilla", "gpg"} == set(POLICY_LOSSES) and POLICY_LOSSES["gpg"] is POLICY_LOSSES["reinforce"]


def test_batch_triggers_every_clip_and_selection(reference):
    for name, trained in reference.items():
        token_means = {
            k: v for k, v in trained.metrics.items() if k in ("pg_clipfrac", "pg_clipfrac_lower", "kl_cov_frac")
        }
        assert all(0 < value < 1 for value in token_means.values()), (name, token_means)


@pytest.mark.parametrize("layout", of_release(["tp1", "cp2", "dp2"], ["tp2", "pp2"]))
def test_updates(role_pool, models, reference, tmp_path, layout):
    shape = LAYOUTS[layout]
    with Role(role_pool, ActorWorker, shape, actor_arguments(models.policy_path, shape)) as actor:
        for number, name in enumerate(NAMES[layout]):
            budget = "all rows" if layout == "dp2" else list(BUDGETS)[number % len(BUDGETS)]
            plan = update_plan(POLICY_LOSSES[name].aggregation, budget)
            actor.rebuild(config=configured(name), plan=plan)
            check(actor, models, reference[name], tmp_path / name, UNEVEN if layout == "dp2" else None)


def check(actor, models, expected, folder, plan):
    results = actor.split("update_actor", models.batch, MINI_BATCH_ROWS, plan=plan)
    expected_metrics = {f"actor/{name}": value for name, value in expected.metrics.items()} | {
        "actor/skipped_steps": 0.0,
        "actor/empty_steps": 0.0,
    }
    for metrics in results:
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    actor.call("export_hf", str(folder))
    (file,) = folder.glob("*.safetensors")
    ours = load_file(file)
    assert set(ours) == set(expected.weights)
    for name, theirs in expected.weights.items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_user_defined_policy_loss(role_pool, models, reference, tmp_path):
    """A function in a file that the workers import."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from megarl.algorithms import TokenLoss\n\n\n"
        "def plain(inputs):\n"
        "    kl = (inputs.old_log_prob - inputs.log_prob).detach()\n"
        '    return TokenLoss(-inputs.advantages * inputs.log_prob, {"ppo_kl": kl})\n',
        encoding="utf-8",
    )
    config = dataclasses.replace(configured("reinforce"), policy_loss=PolicyLossConfig(loss_mode=f"{file}:plain"))
    arguments = actor_arguments(models.policy_path, LAYOUTS["tp1"]) | {"config": config}
    with Role(role_pool, ActorWorker, LAYOUTS["tp1"], arguments) as actor:
        check(actor, models, reference["reinforce"], tmp_path / "hf", None)
