import re

import pytest
import ray
from support.expected_errors import raises
from support.waits import wait_until

from megarl.base.errors import ResourceError
from megarl.cluster.resources import ResourcePool, check_resources
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.models import ParallelLayout

TWO_HOSTS = [{"CPU": 16.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    "pools",
    [
        [("train", "cuda", [8]), ("rollout", "cuda", [4])],
        [("rollout", "cuda", [4]), ("train", "cuda", [8])],
        [("all", "cuda", [4, 8])],
        [("small", "cuda", [4, 4, 4])],
        [("train", "cuda", [8, 4]), ("rewards", "cpu", [8, 12])],
    ],
)
def test_pools_that_fit(pools):
    check_resources([ResourcePool(*pool) for pool in pools], TWO_HOSTS)


@pytest.mark.parametrize(
    ("pools", "needed", "failing"),
    [
        ([("train", "cuda", [8]), ("rollout", "cuda", [8])], "16 needed, 12 available", "train|rollout"),
        ([("train", "cuda", [12])], "12 needed, 12 available", "train"),
        ([("train", "cuda", [8, 4]), ("more", "cuda", [1])], "13 needed, 12 available", "more"),
        ([("train", "cuda", [8, 4]), ("rewards", "cpu", [12, 12])], "36 needed, 32 available", "rewards"),
    ],
)
def test_pools_that_do_not_fit_report_required_and_available_devices(pools, needed, failing):
    with raises("ray.too-few-devices", needed, "2 node(s): 8 GPU and 16 CPU, 4 GPU and 16 CPU") as caught:
        check_resources([ResourcePool(*pool) for pool in pools], TWO_HOSTS)
    for name, _, _ in pools:
        assert f"pool '{name}' needs" in caught.value.text
    assert re.search(f"pool '({failing})' cannot", caught.value.text)


def test_gpus_on_a_machine_without_gpus_raise():
    with pytest.raises(ResourceError) as caught:
        check_resources([ResourcePool("main", "cuda", [2])], [{"CPU": 4.0}])
    assert str(caught.value) == (
        "not enough GPUs: 2 needed, 0 available, and pool 'main' cannot be placed. Requested: pool 'main' needs 2 "
        "GPU(s) as [2] per node. The cluster has 1 node(s): 0 GPU and 4 CPU. Give the pool fewer devices (roles that "
        "share a pool share its devices), or add GPUs or nodes. [ray.too-few-devices]"
    )


@pytest.mark.parametrize(
    ("device", "devices", "code", "value"),
    [
        ("tpu", [1], "ray.pool-device", "device='tpu'"),
        ("cpu", [], "ray.pool-size", "devices_per_node=[]"),
        ("cpu", [2, 0], "ray.pool-size", "devices_per_node=[2, 0]"),
    ],
)
def test_invalid_pool_raises(device, devices, code, value):
    with raises(code, "pool 'main'", value):
        ResourcePool("main", device, devices)


def test_process_with_several_gpus_sees_only_those(forked_workers, monkeypatch):
    """Ray only needs to believe that there are GPUs."""
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 4}')
    with RaySession(num_cpus=4) as session:
        pool = session.place([ResourcePool("main", "cuda", [4])])["main"]
        worker = "tests.cluster.light_workers.Sleeper"
        replicas = WorkerGroup("rollout", worker, {}, ParallelLayout(dp=2), pool, devices_per_process=2)
        assert replicas.gpus() == ["0,1", "2,3"]
        replicas.restart([1])
        assert replicas.gpus() == ["0,1", "2,3"]
        further = WorkerGroup(
            "rollout_node", worker, {}, ParallelLayout(dp=2), pool, devices_per_process=1, first_devices=[1, 3]
        )
        assert further.gpus() == ["1", "3"]
        assert WorkerGroup("actor", worker, {}, ParallelLayout(dp=4), pool).gpus() == ["0", "1", "2", "3"]


def test_place_pools_raises_on_missing_and_busy_devices():
    with RaySession(num_cpus=2) as session:
        with raises("ray.too-few-devices", "CPU", "3 needed, 2 available"):
            session.place([ResourcePool("main", "cpu", [3])])
        held = session.place([ResourcePool("other job", "cpu", [1])])["other job"]
        wait_until(lambda: ray.available_resources()["CPU"] == 1)  # the node reports it a moment later
        with raises("ray.devices-busy", "pool 'main'", "0.5 s", "free now: 1 CPU"):
            session.place([ResourcePool("main", "cpu", [2])], timeout_s=0.5)
        held.close()
        placed = session.place([ResourcePool("main", "cpu", [2])], timeout_s=120)["main"]
        assert [placed.device_of(rank) for rank in range(4)] == [0, 1, 0, 1]
        assert [placed.local_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
        own = ray.get_runtime_context().get_node_id()
        one, two = "a" * len(own), "b" * len(own)
        for nodes, expected in (({0: own}, [own] * 4), ({0: one, 1: own, 2: two}, [own, one, two, own])):
            placed._nodes = nodes  # as if the pool had these
            options = [placed.host_options(rank) for rank in range(4)]
            assert [option["scheduling_strategy"].node_id for option in options] == expected
        with raises("ray.session-open"), RaySession():
            pass
