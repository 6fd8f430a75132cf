"""What a worker saves continues exactly in a new worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import ProcessPool
from role_processes import CRITIC, LAYOUTS, Role, actor_arguments, role_settings, update_plan
from tiny_policies import LR, Models

from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_actor_continues_to_the_last_bit(role_pool: ProcessPool, models: Models, tmp_path: Path, layout: str) -> None:
    arguments = actor_arguments(models.policy_path, LAYOUTS[layout], reference=True)
    with Role(role_pool, ActorWorker, LAYOUTS[layout], arguments) as actor:
        reference = actor.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"]
        actor.update("update_actor", models.batch)
        actor.call("save_checkpoint", str(tmp_path / "actor"))
        metrics, weights = actor.update("update_actor", models.batch), actor.local_weights()
    with Role(role_pool, ActorWorker, LAYOUTS[layout], arguments) as resumed:
        resumed.call("load_checkpoint", str(tmp_path / "actor"))
        assert resumed.next_lr() == pytest.approx(LR)
        assert torch.equal(resumed.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"], reference)
        assert resumed.update("update_actor", models.batch) == metrics
        for rank, own in enumerate(resumed.local_weights()):
            assert all(torch.equal(own[name], weights[rank][name]) for name in own)


def test_critic_continues_in_another_layout(role_pool: ProcessPool, models: Models, tmp_path: Path) -> None:
    def critic(layout: str) -> Role:
        arguments = {
            "settings": role_settings(models.critic_path, LAYOUTS[layout]),
            "config": CRITIC,
            "plan": update_plan(),
        }
        return Role(role_pool, CriticWorker, LAYOUTS[layout], arguments)

    with critic("tp2") as worker:
        worker.update("update_critic", models.batch)
        worker.call("save_checkpoint", str(tmp_path / "critic"))
        metrics = worker.update("update_critic", models.batch)
        values = worker.map("compute_values", models.batch).tensors["values"]
    with critic("pp2") as worker:
        worker.call("load_checkpoint", str(tmp_path / "critic"))
        assert worker.update("update_critic", models.batch) == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        continued = worker.map("compute_values", models.batch).tensors["values"]
    assert (continued - values).abs().max() < 1e-5
