"""An update with rollout correction gives the metrics and weights of a plain loop over tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import ProcessPool
from role_processes import LAYOUTS, MINI_BATCH_ROWS, Role, actor_arguments, update_plan
from safetensors.torch import load_file
from tiny_policies import Models, actor_tokens, load_model, train

from megarl.workers.actor import ActorWorker


def test_rollout_correction_weights_and_rejected_tokens(role_pool: ProcessPool, models: Models, tmp_path: Path) -> None:
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
