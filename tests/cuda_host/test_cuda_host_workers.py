"""The roles that train, offloaded between their phases: every verb of a step, with every policy loss."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from role_processes import ACTOR, CRITIC, log_prob_settings, role_settings, update_plan
from tiny_policies import save_model, training_batch

from megarl.algorithms import POLICY_LOSSES
from megarl.base.ports import held_port
from megarl.config.schema.roles import PolicyLossConfig
from megarl.megatron import shutdown_runtime
from megarl.models import ParallelLayout
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import WorkerPlace

OFFLOADED = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


def settings(folder):
    # Some results are not finite, and a step is then skipped.
    on_cpu = role_settings(folder, ParallelLayout(), megatron=OFFLOADED, max_skipped_steps=1000)
    return replace(on_cpu, device="cuda", megatron=replace(on_cpu.megatron, dtype="bfloat16"))


@contextmanager
def started(worker_cls, **arguments):
    with held_port("127.0.0.1") as port:
        worker = worker_cls(WorkerPlace(0, 1, "127.0.0.1", port), **arguments)
    try:
        worker.init_model()
        yield worker
    finally:
        shutdown_runtime()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "policy", num_attention_heads=4, head_dim=8)
    save_model(folder / "critic", critic=True)
    return folder / "policy", folder / "critic"


def test_actor(folders, tmp_path):
    batch = training_batch(None, None)
    actor = started(
        ActorWorker,
        settings=settings(folders[0]),
        config=ACTOR,
        plan=update_plan(),
        log_prob=log_prob_settings(),
        reference=log_prob_settings("one row"),
    )
    with actor as worker:
        for verb, column in (("compute_log_prob", "old_log_probs"), ("compute_ref_log_prob", "ref_log_prob")):
            values = getattr(worker, verb)(batch).tensors[column]
            assert values.shape == batch.tensors["responses"].shape and values.device.type == "cpu"
        for name in POLICY_LOSSES:
            worker.config = replace(ACTOR, policy_loss=PolicyLossConfig(loss_mode=name))
            worker.plan = update_plan(POLICY_LOSSES[name].aggregation or "token-mean")
            assert "actor/pg_loss" in worker.update_actor(batch), name
        worker.export_hf(str(tmp_path / "hf"))
        assert list((tmp_path / "hf").glob("*.safetensors"))


def test_critic(folders):
    batch = training_batch(None, None)
    with started(CriticWorker, settings=settings(folders[1]), config=CRITIC, plan=update_plan()) as worker:
        values = worker.compute_values(batch).tensors["values"]
        assert values.shape == batch.tensors["responses"].shape and values.device.type == "cpu"
        assert "critic/vf_loss" in worker.update_critic(batch)
