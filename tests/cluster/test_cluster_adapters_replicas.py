import asyncio

import psutil
import pytest

from megarl.cluster import RaySession, ResourcePool, WorkerFailed, WorkerGroup
from megarl.cluster.adapters import GroupReplica
from megarl.models import ParallelLayout
from megarl.rollout.interface import SamplingParams
from megarl.rollout.router import NoReplicaLeft, ReplicaLost, Router


def test_dead_replica_is_reported_and_replaced():
    """The other replica keeps serving; the new process has no state of the old one."""
    with RaySession(num_cpus=1) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
        group = WorkerGroup("rollout", "tests.cluster.light_workers.Answerer", {}, ParallelLayout(dp=2), pool)
        pids = group.init_model()
        replicas = [GroupReplica(group, rank) for rank in range(2)]

        async def ask(rank, *requests):
            return await replicas[rank].exchange(list(requests), [], 0.1)

        assert asyncio.run(ask(1, "a")) == [(1, True, "a")]
        with pytest.raises(WorkerFailed, match=r"rollout rank 0 failed in exchange: ValueError: not finite"):
            asyncio.run(ask(0, "raise"))
        assert asyncio.run(ask(0, "b")) == [(0, True, "b")]
        with pytest.raises(ReplicaLost, match="rollout rank 0 failed in exchange: WorkerLost: a process of the engine"):
            asyncio.run(ask(0, "lose"))

        async def both():
            return await asyncio.gather(ask(0, "die"), ask(1, "c"), return_exceptions=True)

        lost, answered = asyncio.run(both())
        assert isinstance(lost, ReplicaLost) and f"rollout rank 0 (pid {pids[0]}" in str(lost)
        assert answered == [(1, True, "c")]
        group.restart([0])
        assert asyncio.run(ask(0, "d")) == [(0, False, "d")]
        (new,) = group.submit_on([0], "init_model").result()
        assert new not in pids and asyncio.run(ask(0, "e")) == [(0, True, "e")]
        assert group.init_model() == [new, pids[1]]
        with pytest.raises(TypeError, match="use call_on"):
            group.submit("exchange", [], [], 0.1)

        # A frozen process does not answer, so the router's time limit finds it; its replacement ends it.
        frozen = psutil.Process(new)
        frozen.suspend()

        async def route():
            async with Router(replicas[:1], 1, timeout_s=1.0) as router:
                await router.generate([1], SamplingParams(1), seed=0)

        with pytest.raises(NoReplicaLeft, match="no answer within 1 s"):
            asyncio.run(route())
        group.restart([0])
        assert group.submit_on([0], "init_model").result() != [new]
        psutil.wait_procs([frozen], timeout=30)
        assert not frozen.is_running()
