import os
import signal
from types import SimpleNamespace

import pytest
from support.expected_errors import raises
from support.node_callers import calls_by_node

from megarl.cluster import calls
from megarl.cluster.calls import WorkerFailed, WorkerSilent
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.sharding_manager import ShardingManager, SyncOptions
from megarl.cluster.worker_group import WorkerGroup
from megarl.models.layout import ParallelLayout
from megarl.samples.replicas import _lost_ranks
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import SyncWave

LAYOUT = RolloutLayout(replicas=2)
PLAN = SimpleNamespace(
    buckets=(None,) * 3,
    nbytes=12,
    waves=(SyncWave(range(2), range(3)),),
    rollout=LAYOUT,
    receivers=[{0: [0, 1], 1: [1]}] * 3,
)
WAVES = SimpleNamespace(
    buckets=(None,) * 3,
    nbytes=12,
    waves=(SyncWave(range(1), range(1)), SyncWave(range(1, 2), range(1, 3))),
    rollout=LAYOUT,
    receivers=[{0: [0]}, {0: [1], 1: [1]}, {0: [1], 1: [1]}],
)


@pytest.fixture(scope="module")
def peers(forked_workers):
    with RaySession(num_cpus=1) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]

        def trainer(**kwargs):
            name = "tests.cluster.light_workers.Trainer"
            return WorkerGroup("actor", name, {"destinations": 2, **kwargs}, ParallelLayout(tp=2), pool)

        engines = WorkerGroup("rollout", "tests.cluster.light_workers.Engine", {}, ParallelLayout(dp=2), pool)
        yield trainer, engines


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_every_message_reaches_its_rank_in_order(peers, ranks_per_node):
    trainer, engines = peers
    with calls_by_node(ranks_per_node):
        actor = trainer()
    options = SyncOptions(verify_freq=1, free_engine=True)
    manager = ShardingManager(PLAN, actor, engines, options)
    for version in (1, 2):
        metrics = manager.sync_weights()
        assert (metrics["weight_sync/buckets"], metrics["weight_sync/peak_mb"]) == (3, 1)
        manager.free_engines()
        first = [("wake", "weights"), ("begin", version), ("open", 0)]
        last = [("close", True), ("wake", "kv_cache"), ("end", version), ("sleep", "weights", "kv_cache")]
        assert engines.seen() == [
            [*first, (0, [0]), (1, [100]), (2, [200]), *last],
            [*first, (0, [1, 11]), (1, [101, 111]), (2, [201, 211]), *last],
        ]
    assert actor.still_packed() == [[], []]
    actor.shutdown()


def test_the_processes_of_a_wave_hold_their_requests_and_get_their_messages(peers):
    trainer, engines = peers
    actor = trainer(only=[0, 1, 1])
    manager = ShardingManager(WAVES, actor, engines, SyncOptions(verify_freq=1))
    for version in (1, 2):
        _, paused = manager.sync_weights_in_flight()
        assert paused == [(1, 10), (1, 10)]
        first, last = [("pause",), ("begin", version), ("open", 0)], [("close", True), ("end", version), ("resume",)]
        assert engines.seen() == [
            [*first, (0, [0]), *last],
            [*first, (1, [101, 111]), (2, [201, 211]), *last],
        ]
    assert actor.still_packed() == [[], []]
    actor.shutdown()


def test_process_receives_the_messages_of_all_its_ranks(peers):
    """Two processes of two ranks each, so four destinations; a process returns one result per rank."""
    trainer, engines = peers
    actor, pool = trainer(destinations=4), engines.pool
    replicas = WorkerGroup("rollout", "tests.cluster.light_workers.Engine", {"ranks": 2}, ParallelLayout(dp=2), pool)
    plan = SimpleNamespace(
        **vars(PLAN) | {"rollout": RolloutLayout(2, replicas=2), "receivers": [{0: [0, 1], 1: [0, 1]}] * 3}
    )
    ShardingManager(plan, actor, replicas, SyncOptions(verify_freq=1)).sync_weights()
    buckets = [[event for event in events if type(event[0]) is int] for events in replicas.seen()]
    first, second = [(0, [0, 1, 11]), (1, [100, 101, 111])], [(0, [2, 3, 12, 13]), (1, [102, 103, 112, 113])]
    assert [events[:2] for events in buckets] == [first, second]
    for group in (actor, replicas):
        group.shutdown()


def test_failed_source_is_named_and_the_update_is_not_ended(peers):
    trainer, engines = peers
    actor = trainer(fail_at=(1, 1))
    manager = ShardingManager(PLAN, actor, engines)
    with raises("sync.failed", "bucket 2 of 3", "actor rank 1", "export_bucket: MemoryError"):
        manager.sync_weights()
    assert manager.version == 0
    assert all(("end", 1) not in events for events in engines.seen()), "and the engines still answer"
    left = actor.submit_on([0, 1], "still_packed", after_failure=True).result()
    assert left == [[], []], "the rank that lives has closed the transfer, too"
    actor.shutdown()


@pytest.mark.parametrize("dies", [True, False])
def test_a_failed_replica_does_not_keep_the_others_from_the_abort(peers, dies):
    """The survivor holds its requests, closes the transfer, and its weights become stale."""
    trainer, pool = peers[0], peers[1].pool
    actor = trainer()
    fail = {"fail_at": (1, 1, dies)}
    engines = WorkerGroup("rollout", "tests.cluster.light_workers.Engine", fail, ParallelLayout(dp=2), pool)
    manager = ShardingManager(PLAN, actor, engines)
    bucket = "bucket" if dies else "bucket 2"  # a death may overtake the reply for bucket 1
    with raises("sync.failed", bucket, "rollout rank 1"):
        manager.sync_weights_in_flight()
    (events,) = engines.submit_on([0], "seen", after_failure=True).result()
    assert events[-3:] == [("pause",), ("close", False), ("begin", 1)]
    for group in (actor, engines):
        group.shutdown()


def test_stopped_process_is_named_and_can_be_replaced(peers, monkeypatch):
    """The limit of a second holds for the stopped process; the other one, on a busy machine, may take longer."""
    wait = calls.first_ready

    def first_ready(refs, timeout_s, most=1):
        return wait(refs, timeout_s, most) or (wait(refs, 60) if len(refs) > 1 else [])

    monkeypatch.setattr(calls, "first_ready", first_ready)
    trainer, _ = peers
    actor, pool = trainer(destinations=2), peers[1].pool
    engines = WorkerGroup("rollout", "tests.cluster.light_workers.Engine", {}, ParallelLayout(dp=2), pool)
    options = SyncOptions(timeout_s=1.0, free_engine=True)
    manager = ShardingManager(PLAN, actor, engines, options)
    os.kill(engines.pid()[1], signal.SIGSTOP)
    with raises("worker.no-answer", "1 s in sleep", "rollout rank 1", error=WorkerSilent) as told:
        manager.free_engines()
    assert told.value.late == (("rollout", 1),)
    with raises("sync.failed", "wake weights", "from: rollout rank 1") as failed:
        manager.sync_weights()
    assert failed.value.text.endswith("rollout rank 1")
    assert _lost_ranks(failed.value, "rollout") == [1] and _lost_ranks(failed.value, "actor") == []
    engines.restart([1])
    manager.options = SyncOptions(timeout_s=120.0, free_engine=True)  # the process has to start
    manager.sync_weights()
    assert ("end", 1) in engines.seen()[1]
    for group in (actor, engines):
        group.shutdown()


def test_payload_for_an_unknown_destination_raises(peers):
    trainer, _ = peers
    actor = trainer()
    with raises("worker.raised", "payload for 2", "[0, 1]", error=WorkerFailed):
        actor.submit_scatter("export_nowhere", {0: [0, 1], 1: [0, 1]}, 1).result()
    actor.shutdown()
