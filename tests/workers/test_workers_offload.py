"""A role that offloads between its phases gives the results of one that stays on the device."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from role_processes import CRITIC, LAYOUTS, Role, actor_arguments, role_settings, update_plan, with_offload

from megarl.megatron import shutdown_runtime
from megarl.megatron.engine.offload import PARTS
from megarl.megatron.runtime.memory import HostBuffer
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import WorkerPlace
from megarl.workers.supervised import SFTWorker


def actors_day(role, models, folder, expected):
    """Results of every verb; checks the offloaded parts after each."""
    numbers: list[Any] = []

    def note(result):
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


def test_offloading_actor_equals_resident_actor(role_pool, models, tmp_path):
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


def test_offloading_critic_equals_resident_critic(role_pool, models):
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


@contextmanager
def actor_process(place, arguments):
    """An actor of one rank, after its start."""
    actor = ActorWorker(WorkerPlace(place.rank, place.world_size, "127.0.0.1", place.port), **arguments)
    try:
        actor.init_model()
        yield actor
    finally:
        shutdown_runtime()


PHASES = ("compute_log_prob", "compute_ref_log_prob", "update_actor")


def returns_of_cached_memory(place, arguments, batch):
    """Micro-batches whose outputs are still held at each return of cached memory to the driver, by phase."""
    returns: dict[str, list[int]] = {}
    with actor_process(place, arguments) as actor, pytest.MonkeyPatch.context() as patch:
        held: list[int] = []
        patch.setattr(torch.cuda, "empty_cache", lambda: held.append(len(actor.engine._faults._records)))
        for phase in PHASES:
            getattr(actor, phase)(batch)
            returns[phase] = held.copy()
            held.clear()
        actor.make_room()
        returns["make_room"] = held
    return returns


def test_every_phase_returns_cached_memory_also_without_offload(role_pool, models):
    """An engine that wakes beside the role can only use memory that the driver has."""
    arguments = actor_arguments(models.policy_path, LAYOUTS["tp1"], reference=True)
    (returns,) = role_pool.run(returns_of_cached_memory, 1, arguments, models.batch)
    assert returns == {phase: [0] for phase in (*PHASES, "make_room")}


def pending_and_moments(place, arguments, batch):
    """Pending device bytes before and after the first update, and bytes of Adam's moments after it."""
    with actor_process(place, arguments) as actor:
        before = actor.pending_device_bytes()
        actor.update_actor(batch)
        assert actor.engine.optimizer is not None
        states = [s for inner in actor.engine.optimizer.inner_optimizers() for s in inner.state.values()]
        moments = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
        return before, actor.pending_device_bytes(), moments


def test_pending_memory_is_that_of_adams_moments_unless_they_are_offloaded(role_pool, models):
    arguments = actor_arguments(models.policy_path, LAYOUTS["tp1"])
    ((before, after, moments),) = role_pool.run(pending_and_moments, 1, arguments, models.batch)
    assert before - after == moments > 0
    assert after == 2**30
    ((before, after, _),) = role_pool.run(pending_and_moments, 1, with_offload(arguments), models.batch)
    assert before == after == 2**30


def returns_of_a_supervised_job(place, arguments, batch):
    worker = SFTWorker(WorkerPlace(place.rank, place.world_size, "127.0.0.1", place.port), **arguments)
    try:
        worker.init_model()
        with pytest.MonkeyPatch.context() as patch:
            returns: list[int] = []
            patch.setattr(torch.cuda, "empty_cache", lambda: returns.append(1))
            worker.update_sft(batch)
            return returns
    finally:
        shutdown_runtime()


def test_steps_of_a_supervised_job_keep_their_cached_memory(role_pool, models):
    """No other process uses its GPUs, and the next step would allocate the same memory again."""
    arguments = {"settings": role_settings(models.policy_path, LAYOUTS["tp1"]), "plan": update_plan()}
    assert role_pool.run(returns_of_a_supervised_job, 1, arguments, models.batch) == [[]]


def returns_of_log_probs(place, arguments, batch):
    with actor_process(place, arguments) as actor, pytest.MonkeyPatch.context() as patch:
        returns: list[int] = []
        patch.setattr(torch.cuda, "empty_cache", lambda: returns.append(1))
        actor.compute_log_prob(batch)
        return returns


@pytest.mark.parametrize("alone", [False, True])
def test_phases_of_a_role_alone_on_its_devices_keep_their_cached_memory(role_pool, models, alone):
    arguments = actor_arguments(models.policy_path, LAYOUTS["tp1"])
    arguments["settings"] = replace(arguments["settings"], has_own_devices=alone)
    (returns,) = role_pool.run(returns_of_log_probs, 1, arguments, models.batch)
    assert bool(returns) is not alone


def copies(place, arguments, batch):
    """Bytes of the weights, and bytes copied to host memory and to the device in each call."""
    calls: list[tuple[int, int]] = []
    with actor_process(place, arguments) as actor, pytest.MonkeyPatch.context() as patch:
        out: list[int] = []
        back: list[int] = []
        write, read = HostBuffer.write, HostBuffer.read
        patch.setattr(HostBuffer, "write", lambda self, data: (out.extend(map(len, data)), write(self, data))[1])
        patch.setattr(HostBuffer, "read", lambda self, at, to: (back.append(len(to)), read(self, at, to))[1])

        def note():
            calls.append((sum(out), sum(back)))
            out.clear(), back.clear()

        for phase in (PHASES[0], PHASES[0], PHASES[1], PHASES[1]):
            getattr(actor, phase)(batch)
            note()
        actor.engine.weights.named()  # a weight sync
        actor.make_room()
        note()
        params = actor.engine.weights.parameters().values()
        sizes = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in params}
    return sum(sizes.values()), calls


@pytest.mark.parametrize("offload", [False, True])
def test_phases_copy_unchanged_weights_only_to_the_device(role_pool, models, offload):
    arguments = actor_arguments(models.policy_path, LAYOUTS["tp1"], reference=True)
    ((size, calls),) = role_pool.run(copies, 1, with_offload(arguments) if offload else arguments, models.batch)
    if offload:
        # Each phase onloads; a swap brings the reference only: the own weights are in host memory.
        assert calls == [(0, size)] * 5
    else:
        # The first swap copies the own weights out; both bring the reference, and the own weights back.
        assert calls == [(0, 0), (0, 0), (size, 2 * size), (0, 2 * size), (0, 0)]
