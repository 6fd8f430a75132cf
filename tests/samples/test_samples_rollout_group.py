"""Elastic replicas on real processes: joining, leaving, losses, failed starts."""

from __future__ import annotations

import time

import pytest
import ray

from megarl.base.errors import MegarlError
from megarl.cluster.resources import ResourcePool
from megarl.cluster.role_groups import RolloutGroup
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import wait_ready
from megarl.models import ParallelLayout
from megarl.samples.rollout_group import MOST_FAILURES, ElasticReplicas, ReplicasMissing
from megarl.workers.dispatch import Dispatch, verb
from tests.support.expected_errors import raises
from tests.support.waits import wait_until

WAIT_S = 120.0


class Engine:
    """A replica without an engine; its model cannot be built while a file exists, and is not while another one does."""

    def __init__(self, place, *, broken):
        self.replica, self.broken = place.rank, broken

    @verb(Dispatch.ALL)
    def init_model(self):
        while self.broken.with_name("held").exists():
            time.sleep(0.05)
        if self.broken.exists():
            raise MegarlError("no memory for the weights", code="engine.device-memory")

    @verb(Dispatch.ALL)
    def number(self):
        return self.replica


@pytest.fixture(scope="module")
def pool(forked_workers):
    """Two devices of the three that the pool would like."""
    with RaySession(num_cpus=2) as session:
        yield session.place([ResourcePool("rollout", "cpu", [1, 1, 1], required=1)])["rollout"]


@pytest.fixture
def make(pool, tmp_path):
    groups: list[RolloutGroup] = []

    def build(least, join_timeout_s=WAIT_S):
        pool.release([2])
        pool.request([0, 1])
        wait_until(lambda: pool.is_placed([0, 1]))
        pool.request([2])
        absent = [replica for replica in range(3) if not pool.is_placed([replica])]
        kwargs = {"broken": tmp_path / "broken"}
        worker = "tests.samples.test_samples_rollout_group:Engine"
        groups.append(RolloutGroup("rollout", worker, kwargs, ParallelLayout(dp=3), pool, absent=absent))
        wait_ready([groups[-1]])
        lines: list[str] = []
        elastic = ElasticReplicas(groups[-1], least, join_timeout_s, tmp_path / "replicas", lines.append)
        return groups[-1], elastic, lines

    yield build
    for group in groups:
        group.shutdown()


def numbers(group):
    return group.call("number")


def test_a_lost_replica_leaves_at_once_and_joins_again(make):
    group, elastic, lines = make(least=1)
    assert group.ranks == [0, 1] and group.world_size == 3 and numbers(group) == [0, 1]
    assert elastic.admit() == [] and elastic.leaving() == [], "the third device is not there"
    group.kill(0)
    elastic.lose([0])
    assert numbers(group) == [1]
    wait_until(elastic.admit)
    assert numbers(group) == [0, 1] and lines == ["rollout replica 0 has joined; 2 replicas of 3"]


def test_too_few_replicas_wait_for_others(make):
    group, elastic, lines = make(least=2)
    elastic.lose([1])  # returns when its successor has joined
    assert numbers(group) == [0, 1] and len(lines) == 1
    group, elastic, _ = make(least=3, join_timeout_s=0.5)
    named = ("of 3, 3 are needed (rollout.min_replicas)", "0.5 s (rollout.health.join_timeout_s)")
    with raises("rollout.too-few-replicas", *named, error=ReplicasMissing):
        elastic.lose([0])


def test_a_replica_that_cannot_start_is_reported_and_given_up(make, tmp_path, caplog):
    group, elastic, _ = make(least=1)
    assert numbers(group) == [0, 1]
    (tmp_path / "broken").touch()
    elastic.lose([1])

    def failures():
        assert elastic.admit() == []
        return caplog.text.count("rollout replica 1 cannot join")

    wait_until(lambda: failures() == MOST_FAILURES)
    assert "no memory for the weights" in caplog.text and caplog.text.count("; it is not started again") == 1
    (tmp_path / "broken").unlink()
    assert elastic.admit() == [] and numbers(group) == [0], "the group goes on, and no start is in progress"


def test_the_number_of_replicas_follows_the_file(make, pool, tmp_path, caplog):
    """A run with fewer replicas than it could have reserves devices for those only."""
    group, elastic, lines = make(least=1)
    assert numbers(group) == [0, 1]
    request = tmp_path / "replicas"
    for text in ("0", "4", "two"):
        request.write_text(text, encoding="utf-8")
        assert elastic.leaving() == [] == elastic.leaving()
        assert caplog.text.count(f"{request}: {text!r} has no effect, expected 1 (rollout.min_replicas) to 3") == 1
    request.write_text("1\n", encoding="utf-8")
    assert elastic.leaving() == [1]
    elastic.end([1])
    assert lines == ["rollout replica 1 has left; 1 replica of 3"]
    assert elastic.admit() == [] and elastic.leaving() == [] and numbers(group) == [0]
    wait_until(lambda: ray.available_resources().get("CPU") == 1.0)
    request.write_text("2", encoding="utf-8")
    wait_until(elastic.admit)
    assert numbers(group) == [0, 1]
    wait_until(lambda: "CPU" not in ray.available_resources())
    (tmp_path / "held").touch()
    elastic.lose([1])
    assert elastic.admit() == [] and not elastic.leaving()
    request.write_text("1", encoding="utf-8")
    assert elastic.leaving() == [], "the start of its successor is given up"
    wait_until(lambda: ray.available_resources().get("CPU") == 1.0)
    assert elastic.admit() == [] and numbers(group) == [0]
