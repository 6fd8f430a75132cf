"""A role that offloads between its phases gives the results of one that stays on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed import ProcessPool
from role_processes import CRITIC, LAYOUTS, Role, actor_arguments, role_settings, update_plan, with_offload
from tiny_policies import Models

from megarl.megatron.offload import PARTS
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker


def actors_day(role: Role, models: Models, folder: Path, expected: tuple[str, ...]) -> list[Any]:
    """Results of every verb; checks the offloaded parts after each."""
    numbers: list[Any] = []

    def note(result: Any) -> None:
        numbers.append(result)
        assert role.offloaded_parts() == expected

    for _ in range(2):
        note(role.map("compute_log_prob", models.batch).tensors["old_log_probs"].tolist())
        note(role.map("compute_ref_log_prob", models.batch).tensors["ref_log_prob"].tolist())
        note(role.update("update_actor", models.batch))
    note(role.call("save_checkpoint", str(folder / "checkpoint")))
    assert not any(part.failure for part in role.call("finish_checkpoint"))
    role.rebuild()
    note(role.call("load_checkpoint", str(folder / "checkpoint")))
    note(role.update("update_actor", models.batch))
    note(role.call("export_hf", str(folder / "hf")))
    return [*numbers, (folder / "hf" / "model.safetensors").read_bytes()]


def test_offloading_actor_equals_resident_actor(role_pool: ProcessPool, models: Models, tmp_path: Path) -> None:
    arguments = actor_arguments(models.policy_path, LAYOUTS["dp2"], reference=True)
    with Role(role_pool, ActorWorker, LAYOUTS["dp2"], arguments) as actor:
        plain = actors_day(actor, models, tmp_path / "plain", ())
    with Role(role_pool, ActorWorker, LAYOUTS["dp2"], with_offload(arguments)) as actor:
        rested = actors_day(actor, models, tmp_path / "rested", PARTS)
    for mine, other in zip(rested, plain, strict=True):
        if isinstance(mine, dict):
            freed = {name: mine.pop(name) for name in list(mine) if name.startswith("perf/")}
            assert freed.keys() == {f"perf/offloaded_gb/{part}" for part in PARTS}
            assert all(value > 0 for value in freed.values())
        assert mine == other


def test_offloading_critic_equals_resident_critic(role_pool: ProcessPool, models: Models) -> None:
    layout = LAYOUTS["pp2"]
    arguments = {"settings": role_settings(models.critic_path, layout), "config": CRITIC, "plan": update_plan()}
    with Role(role_pool, CriticWorker, layout, with_offload(arguments)) as critic:
        critic.map("compute_values", models.batch)
        assert critic.offloaded_parts() == PARTS
        metrics = critic.update("update_critic", models.batch)
        assert critic.offloaded_parts() == PARTS
        assert {name for name in metrics if name.startswith("perf/")} == {
            f"perf/critic/offloaded_gb/{part}" for part in PARTS
        }
