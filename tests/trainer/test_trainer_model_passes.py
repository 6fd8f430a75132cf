"""Passes of a step are grouped by the devices of their roles, and each group runs at the same time."""

from __future__ import annotations

from typing import Any

from megarl.cluster.calls import completed_call
from megarl.trainer.jobs.devices import JobPools
from megarl.trainer.jobs.worker_groups import pending_device_bytes
from megarl.trainer.phases.model_passes import ModelPass, simultaneous_passes, verb_pass


class Group:
    """A worker group whose calls are complete at once."""

    def __init__(self, pool: Any, pending: list[int]) -> None:
        self.pool, self.pending = pool, pending

    def submit(self, verb: str, *args: Any) -> Any:
        return completed_call(self.pending if verb == "pending_device_bytes" else (verb, *args))


class Pool:
    """Devices without a Ray."""

    def __init__(self) -> None:
        self.processes = object()


def test_roles_on_separate_devices_run_at_the_same_time() -> None:
    shared, apart, third = Pool(), Pool(), Pool()

    def groups(**devices: Any) -> list[list[str]]:
        passes = [ModelPass(name, used, lambda batch, metrics: completed_call(None)) for name, used in devices.items()]
        return [[one.name for one in group] for group in simultaneous_passes(passes)]

    assert groups(old=(shared,), ref=(shared,), values=(shared,)) == [["old"], ["ref"], ["values"]]
    assert groups(old=(shared,), ref=(apart,), values=(third,)) == [["old", "ref", "values"]]
    assert groups(old=(shared,), ref=(shared,), values=(apart,)) == [["old", "values"], ["ref"]]
    assert groups(old=(), teacher=(shared, apart), values=(apart,)) == [["old", "teacher"], ["values"]]


def test_a_pass_runs_a_verb_of_its_group_on_the_batch() -> None:
    group: Any = Group(Pool(), [])
    one = verb_pass("values", group, "compute_values", first_step=3)
    assert (one.name, one.devices, one.first_step) == ("values", (group.pool,), 3)
    assert one.submit("rows", {}).result() == ("compute_values", "rows")  # type: ignore[arg-type]


def test_engines_leave_room_for_the_roles_on_their_devices() -> None:
    """The fullest rank of each role, 3 and 20 bytes; the critic has devices of its own."""
    shared, apart = Pool(), Pool()
    actor, reference, critic = Group(shared, [3, 1]), Group(shared, [20]), Group(apart, [100, 100])
    assert pending_device_bytes(shared, [actor, reference, critic]) == 23  # type: ignore[list-item,arg-type]
    assert pending_device_bytes(Pool(), [actor, critic]) is None  # type: ignore[list-item,arg-type]


def test_processes_of_all_pools_are_watched_together() -> None:
    trainer, critic = Pool(), Pool()
    pools = JobPools(trainer, {"critic": critic})  # type: ignore[arg-type, dict-item]
    assert pools.of("critic") is critic and pools.of("reward_model") is trainer
    assert critic.processes is trainer.processes
