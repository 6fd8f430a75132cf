"""A saved worker resumes exactly in a new worker, for synchronous and background saves."""

import pytest
import torch
from role_processes import CRITIC, LAYOUTS, Role, actor_arguments, role_settings, update_plan, with_offload
from tiny_policies import LR

from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker

ALL = ("model", "optimizer", "extra")


def save(role, path, in_background=False, contents=ALL):
    role.call("save_checkpoint", str(path), contents, in_background)


def finish(role, path):
    parts = role.call("finish_checkpoint")
    assert [part.failure for part in parts] == [""] * len(parts)
    results = {name: entry.size for part in parts for name, entry in part.entries.items()}
    files = [file for file in path.rglob("*") if file.is_file()]
    assert results == {file.relative_to(path).as_posix(): file.stat().st_size for file in files}


@pytest.mark.parametrize(("layout", "in_background"), [("tp2", False), ("pp2", True), ("dp2", True)])
def test_actor_resumes_bit_exact(role_pool, models, tmp_path, layout, in_background):
    arguments = with_offload(actor_arguments(models.policy_path, LAYOUTS[layout], reference=True))
    with Role(role_pool, ActorWorker, LAYOUTS[layout], arguments) as actor:
        reference = actor.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"]
        actor.update("update_actor", models.batch)
        save(actor, tmp_path / "actor", in_background)
        metrics, weights = actor.update("update_actor", models.batch), actor.local_weights()
        finish(actor, tmp_path / "actor")
        assert actor.call("checkpoint_written") == [True, True]
    with Role(role_pool, ActorWorker, LAYOUTS[layout], arguments) as resumed:
        resumed.call("load_checkpoint", str(tmp_path / "actor"))
        assert resumed.next_lr() == pytest.approx(LR)
        assert torch.equal(resumed.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"], reference)
        assert resumed.update("update_actor", models.batch) == metrics
        for rank, own in enumerate(resumed.local_weights()):
            assert all(torch.equal(own[name], weights[rank][name]) for name in own)


def test_actor_resumes_in_another_layout_with_the_same_metrics(role_pool, models, tmp_path):
    def actor(layout):
        return Role(role_pool, ActorWorker, LAYOUTS[layout], actor_arguments(models.policy_path, LAYOUTS[layout]))

    without_reference = models.batch
    with actor("dp2") as worker:
        worker.update("update_actor", without_reference)
        save(worker, tmp_path / "actor", in_background=True, contents=(*ALL, "hf_model"))
        finish(worker, tmp_path / "actor")
        assert (tmp_path / "actor" / "huggingface" / "config.json").is_file()
        metrics = worker.update("update_actor", without_reference)
    with actor("tp2") as worker:
        worker.call("load_checkpoint", str(tmp_path / "actor"))
        assert worker.update("update_actor", without_reference) == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_critic_resumes_in_another_layout(role_pool, models, tmp_path):
    def critic(layout):
        arguments = {
            "settings": role_settings(models.critic_path, LAYOUTS[layout]),
            "config": CRITIC,
            "plan": update_plan(),
        }
        return Role(role_pool, CriticWorker, LAYOUTS[layout], arguments)

    with critic("tp2") as worker:
        worker.update("update_critic", models.batch)
        save(worker, tmp_path / "critic")
        finish(worker, tmp_path / "critic")
        metrics = worker.update("update_critic", models.batch)
        values = worker.map("compute_values", models.batch).tensors["values"]
    with critic("pp2") as worker:
        worker.call("load_checkpoint", str(tmp_path / "critic"))
        assert worker.update("update_critic", models.batch) == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        continued = worker.map("compute_values", models.batch).tensors["values"]
    assert (continued - values).abs().max() < 1e-5


def test_failed_save_is_a_result_and_the_worker_trains_on(role_pool, models, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with Role(role_pool, ActorWorker, LAYOUTS["tp2"], actor_arguments(models.policy_path, LAYOUTS["tp2"])) as actor:
        save(actor, tmp_path / "taken")
        for part in actor.call("finish_checkpoint"):
            assert "is not empty" in part.failure and part.entries == {}
        actor.update("update_actor", models.batch)
        save(actor, tmp_path / "free")
        finish(actor, tmp_path / "free")
