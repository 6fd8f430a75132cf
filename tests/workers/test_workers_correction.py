"""An update with rollout correction gives the metrics and weights of a plain loop over tokens."""

import math

import pytest
import torch
from role_processes import LAYOUTS, MINI_BATCH_ROWS, Role, actor_arguments, update_plan
from safetensors.torch import load_file
from tiny_policies import RESPONSE_WIDTH, actor_tokens, load_model, policy_tokens, train

from megarl.algorithms import Truncation, proximal_fractions
from megarl.workers.actor import ActorWorker


def test_rollout_correction_weights_and_rejected_tokens(role_pool, models, tmp_path):
    """Weights multiply the policy loss, not entropy and KL; rejected tokens count in no mean, on any rank."""
    mask = models.batch.tensors["response_mask"].clone()
    weights = 2 * mask * torch.rand(mask.shape, generator=torch.Generator().manual_seed(4))
    mask[3] = mask[4, 1:3] = 0
    batch = models.batch.with_columns({"rollout_is_weights": weights, "response_mask": mask})
    expected = train(load_model(models.policy_path), batch, actor_tokens, "seq-mean-token-mean", MINI_BATCH_ROWS)
    arguments = actor_arguments(models.policy_path, LAYOUTS["dp2"]) | {"plan": update_plan("seq-mean-token-mean")}
    with Role(role_pool, ActorWorker, LAYOUTS["dp2"], arguments) as actor:
        metrics = actor.update("update_actor", batch)
        actor.call("export_hf", str(tmp_path / "hf"))
    assert {name: metrics[f"actor/{name}"] for name in expected.metrics} == pytest.approx(
        expected.metrics, rel=1e-5, abs=1e-6
    )
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    ours = load_file(file)
    assert set(ours) == set(expected.weights)
    for name, theirs in expected.weights.items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-6)


def test_loglinear_proximal_policy(role_pool, models, tmp_path):
    """Ratio and weight are about the estimate between behaviour and current policy, anew in each mini-batch."""
    real = models.batch.tensors["attention_mask"][:, -RESPONSE_WIDTH:]
    versions = torch.randint(-1, 4, real.shape, generator=torch.Generator().manual_seed(8))
    fractions = proximal_fractions(versions, 3) * real
    batch = models.batch.with_columns({"proximal_fractions": fractions})

    def tokens(model, row):
        current = policy_tokens(model, row)[0].detach()
        behaviour = row.columns["old_log_probs"]
        proximal = behaviour + row.columns["proximal_fractions"] * (current - behaviour)
        weights = torch.tensor([min(math.exp(a - b), 1.2) for a, b in zip(proximal, behaviour, strict=True)])
        known = {**row.columns, "old_log_probs": proximal, "rollout_is_weights": weights}
        losses = actor_tokens(model, row._replace(columns=known))
        return [
            (loss, like, {**means, "rollout_is_mean": weight})
            for (loss, like, means), weight in zip(losses, weights.tolist(), strict=True)
        ]

    expected = train(load_model(models.policy_path), batch, tokens, "token-mean", MINI_BATCH_ROWS)
    arguments = actor_arguments(models.policy_path, LAYOUTS["dp2"]) | {"correction": Truncation(1.2)}
    with Role(role_pool, ActorWorker, LAYOUTS["dp2"], arguments) as actor:
        metrics = actor.update("update_actor", batch)
        actor.call("export_hf", str(tmp_path / "hf"))
    assert {name: metrics[f"actor/{name}"] for name in expected.metrics} == pytest.approx(
        expected.metrics, rel=1e-5, abs=1e-6
    )
    assert 0.5 < metrics["actor/rollout_is_mean"] < 1.2
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    for name, ours in load_file(file).items():
        torch.testing.assert_close(ours, expected.weights[name], rtol=1e-5, atol=1e-6)
