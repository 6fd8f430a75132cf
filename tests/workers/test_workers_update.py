"""Updates give the metrics and weights of a plain loop over tokens, for any micro-batches."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from role_processes import (
    ACTOR,
    BUDGETS,
    CRITIC,
    LAYOUTS,
    MINI_BATCH_ROWS,
    Role,
    actor_arguments,
    role_settings,
    update_plan,
)
from safetensors.torch import load_file
from tiny_policies import Trained, actor_tokens, critic_tokens, load_model, sft_tokens, train

from megarl.base.algorithm_names import LOSS_AGG_MODES
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.rows import PackedRows
from megarl.workers.supervised import SFTWorker

TOKENS = {"actor": actor_tokens, "critic": critic_tokens, "sft": sft_tokens}
# Each mode and each cut; other layouts are the matter of the exactness tests.
CASES = [(layout, mode, list(BUDGETS)[i % 3]) for layout in ("tp1", "dp2") for i, mode in enumerate(LOSS_AGG_MODES)]


@pytest.fixture(scope="module")
def reference(models):
    """Results of two mini-batches of a role by plain loops, by role and aggregation; computed once each."""
    known: dict[tuple[str, str], Trained] = {}

    def of(role, mode):
        if (role, mode) not in known:
            path = models.critic_path if role == "critic" else models.policy_path
            model = load_model(path, critic=role == "critic")
            known[role, mode] = train(model, models.batch, TOKENS[role], mode, MINI_BATCH_ROWS)
        return known[role, mode]

    return of


@pytest.fixture(scope="module")
def actor(role_pool, models, request):
    layout = LAYOUTS[request.param]
    with Role(role_pool, ActorWorker, layout, actor_arguments(models.policy_path, layout)) as role:
        yield role


def check(role, folder, metrics, expected, prefix):
    """Exactly these metrics, and the exported weights."""
    expected_metrics = {f"{prefix}/{name}": value for name, value in expected.metrics.items()}
    expected_metrics |= {f"{prefix}/skipped_steps": 0.0, f"{prefix}/empty_steps": 0.0}
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    role.call("export_hf", str(folder))
    (file,) = folder.glob("*.safetensors")
    ours = load_file(file)
    assert set(ours) == set(expected.weights)
    for name, theirs in expected.weights.items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("actor", "mode", "budget"), CASES, indirect=["actor"])
def test_actor(actor, models, reference, tmp_path, mode, budget):
    actor.rebuild(plan=update_plan(mode, budget))
    metrics = actor.update("update_actor", models.batch)
    assert metrics.pop("actor/kl_coef") == ACTOR.kl_loss_coef
    check(actor, tmp_path / "hf", metrics, reference("actor", mode), "actor")


def test_batch_triggers_every_clip(reference):
    """Otherwise the tests of this file could not detect a missing clip."""
    for role, names in (("actor", ["pg_clipfrac", "pg_clipfrac_lower"]), ("critic", ["vf_clipfrac"])):
        for name in names:
            assert 0 < reference(role, "token-mean").metrics[name] < 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_cuts_the_rows_differently(models, budget):
    rows = PackedRows(models.batch)
    cut = rows.micro_batches(BUDGETS[budget])
    assert sorted(row for group in cut for row in group) == list(range(8))
    assert len(cut) == {"one row": 8, "all rows": 1}.get(budget, len(cut))
    assert budget != "tokens" or 1 < len(cut) < 8


@pytest.mark.parametrize(
    ("layout", "mode", "budget"),
    [
        ("tp2", "seq-mean-token-mean", "tokens"),
        ("cp2", "seq-mean-token-sum", "one row"),
    ],
)
def test_critic(
    role_pool,
    models,
    reference,
    tmp_path,
    layout,
    mode,
    budget,
):
    arguments = {
        "settings": role_settings(models.critic_path, LAYOUTS[layout]),
        "config": CRITIC,
        "plan": update_plan(mode, budget),
    }
    with Role(role_pool, CriticWorker, LAYOUTS[layout], arguments) as critic:
        metrics = critic.update("update_critic", models.batch)
        check(critic, tmp_path / "hf", metrics, reference("critic", mode), "critic")


@pytest.mark.parametrize(("layout", "budget"), [("pp2", "tokens"), ("dp2", "all rows")])
def test_sft(
    role_pool,
    models,
    reference,
    tmp_path,
    layout,
    budget,
):
    plan = update_plan("token-mean", budget)
    arguments = {"settings": role_settings(models.policy_path, LAYOUTS[layout]), "plan": plan}
    with Role(role_pool, SFTWorker, LAYOUTS[layout], arguments) as worker:
        metrics = worker.update("update_sft", models.batch)
        check(worker, tmp_path / "hf", metrics, reference("sft", "token-mean"), "train")


@pytest.mark.parametrize("actor", ["dp2"], indirect=True)
def test_epochs_repeat_the_same_mini_batches(actor, models):
    def passes(epochs, calls):
        actor.rebuild(plan=update_plan(epochs=epochs))
        return [actor.update("update_actor", models.batch) for _ in range(calls)][-1], actor.local_weights()

    _, once_more = passes(epochs=1, calls=2)
    metrics, twice = passes(epochs=2, calls=1)
    for rank, weights in enumerate(twice):
        assert all(torch.equal(weights[name], once_more[rank][name]) for name in weights)
    # 4 optimizer steps, the warm-up has 3.
    assert metrics["actor/lr"] == pytest.approx(1e-2 * (1 / 3 + 2 / 3 + 1 + 1) / 4)


@pytest.mark.parametrize("actor", ["tp1"], indirect=True)
def test_without_kl_loss_and_entropy_bonus(actor, models):
    """No reference column is read, and neither has a metric."""
    plain = dataclasses.replace(ACTOR, use_kl_loss=False, entropy_coeff=0.0)
    actor.rebuild(plan=update_plan(), config=plain)
    batch = models.batch.select([name for name in models.batch.tensors if name != "ref_log_prob"])
    metrics = actor.update("update_actor", batch)
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-6)
    assert not {name for name in metrics if "kl_loss" in name or "kl_coef" in name or "entropy" in name}
    actor.rebuild(config=ACTOR)


@pytest.mark.parametrize("actor", ["tp1"], indirect=True)
def test_nonfinite_values_at_tool_tokens_are_ignored(actor, models, reference, tmp_path):
    """Values of masked tokens reach neither loss nor gradient, even if a weight of zero would not remove them."""
    masked = ~models.batch.tensors["response_mask"].bool() & models.batch.tensors["attention_mask"][:, -8:].bool()
    wild = {
        name: models.batch.tensors[name].masked_fill(masked, float("nan"))
        for name in ("old_log_probs", "ref_log_prob", "advantages")
    }
    actor.rebuild(plan=update_plan("token-mean", "tokens"))
    metrics = actor.update("update_actor", models.batch.with_columns(wild, {}))
    assert metrics.pop("actor/kl_coef") == ACTOR.kl_loss_coef
    check(actor, tmp_path / "hf", metrics, reference("actor", "token-mean"), "actor")


def count_objects(place):
    gc.collect()
    return len(gc.get_objects()) + gc.get_freeze_count()  # the pool freezes objects after an import


@pytest.mark.parametrize("actor", ["tp1"], indirect=True)
def test_updates_leave_no_objects_behind(actor, models):
    def objects_after(updates):
        for _ in range(updates):
            actor.map("compute_log_prob", models.batch)
            actor.update("update_actor", models.batch)
        (count,) = actor._run(count_objects)
        return count

    before = objects_after(5)  # the first ones fill caches
    assert objects_after(20) - before < 20
