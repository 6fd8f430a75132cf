"""Construction of a job's roles on the devices that they share."""

from __future__ import annotations

import math
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.batch import plan_batches
from megarl.models import WeightMap, read_model_config
from megarl.trainer.roles.devices import JobPools
from megarl.trainer.roles.role_builder import RoleBuilder


@pytest.mark.usefixtures("forked_workers")
def test_engines_are_built_after_the_roles_that_train_and_sleep_until_the_first_sync(train_config, monkeypatch):
    """On a GPU SGLang sizes its KV cache by the memory that is free when it starts."""
    colocated = {"async_training.mode": "colocated", "actor_rollout_ref.rollout.calculate_log_probs": True}
    colocated |= {"algorithm.rollout_correction.rollout_is": "token", "algorithm.adv_estimator": "gae"}
    config = train_config({**colocated, "actor_rollout_ref.rollout.health.timeout_s": 2.0})
    calls: list[tuple[str, str, tuple[Any, ...]]] = []
    submit, submit_on = WorkerGroup.submit, WorkerGroup.submit_on

    def recording(self, verb, *args, **kwargs):
        calls.append((self.role, verb, args))
        return submit(self, verb, *args, **kwargs)

    def recording_on(self, ranks, verb, *args, **options):
        calls.append((self.role, verb, args))
        return submit_on(self, ranks, verb, *args, **options)

    monkeypatch.setattr(WorkerGroup, "submit", recording)
    monkeypatch.setattr(WorkerGroup, "submit_on", recording_on)
    with RaySession(num_cpus=2) as session:
        pool = session.place([ResourcePool("main", "cpu", [config.trainer.num_devices])])["main"]
        roles = RoleBuilder(config, plan_batches(config), 4, JobPools(pool)).build()
        started = [(role, verb) for role, verb, _ in calls]
        assert {"actor", "critic", "rollout"} == {role for role, verb in started if verb == "init_model"}
        assert started.index(("rollout", "init_model")) > max(
            started.index((role, "pending_device_bytes")) for role in ("actor", "critic")
        )
        assert started[-1] == ("rollout", "sleep") and not any("wake" in verb for _, verb in started)

        # The moments of both models, 8 bytes per parameter, and an allowance of 1 GiB for each process.
        sizes = [_elements(str(path)) for path in (config.actor_rollout_ref.model.path, config.critic.model.path)]
        (by_replica,) = next(args for role, verb, args in calls if (role, verb) == ("rollout", "init_model"))
        pending = by_replica.values[0]
        assert 8 * sum(sizes) * 0.9 <= pending - 2 * 2**30 <= 8 * sum(sizes) * 1.1

        assert roles.describe().splitlines()[-1] == "rollout: embedded, TP1, float32"
        assert roles.replicas.sync_weights()["weight_sync/verified"] == 1
        assert roles.replicas.group.weight_version() == [1] * roles.replicas.group.world_size

        # A replica that is frozen when a sync interrupts its requests is replaced after health.timeout_s.
        frozen = roles.replicas.group.processes[0].pid
        os.kill(frozen, signal.SIGSTOP)
        conversations: Any = SimpleNamespace(is_open=False, update_replicas=lambda: None)
        metrics = roles.replicas.sync(conversations, None)
        assert metrics["weight_sync/verified"] == 1 and metrics["rollout_service/interrupted"] == 0
        assert roles.replicas.group.processes[0].pid != frozen
        assert roles.replicas.group.weight_version() == [2] * roles.replicas.group.world_size


def _elements(folder):
    return sum(map(math.prod, WeightMap(read_model_config(folder)).hf_shapes().values()))
