import asyncio
import pickle

import psutil
import pytest
from support.expected_errors import raises

from megarl.base.processes import wait_for_ends
from megarl.cluster import RaySession, ResourcePool, WorkerFailed, WorkerGroup
from megarl.cluster.replica_processes import replica_processes
from megarl.models import ParallelLayout
from megarl.rollout.interface import SamplingParams
from megarl.rollout.router import NoReplicaLeft, ReplicaLost, Router


def test_dead_replica_is_reported_and_replaced(forked_workers):
    """The other replica keeps serving; the new process has no state of the old one."""
    with RaySession(num_cpus=1) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
        worker = "tests.cluster.light_workers.Answerer"
        group = WorkerGroup("rollout", worker, {}, ParallelLayout(dp=2), pool, threads=2)
        pids = group.init_model()
        replicas = replica_processes(group)

        async def ask(rank, *requests):
            await replicas[rank].accept("router", list(requests), [])
            return await replicas[rank].completions("router", 10.0)

        async def ask_while_waiting(rank, *requests):
            """A request reaches a replica that waits for completions."""
            waiting = asyncio.create_task(pickle.loads(pickle.dumps(replicas[rank])).completions("other", 60.0))
            await asyncio.sleep(0.5)
            await replicas[rank].accept("router", list(requests), [])
            return await waiting

        assert asyncio.run(ask_while_waiting(1, "a")) == [(1, True, "a")]
        with raises("worker.raised", "rollout rank 0", "accept: ValueError: not finite", error=WorkerFailed):
            asyncio.run(ask(0, "raise"))
        assert asyncio.run(ask(0, "b")) == [(0, True, "b")]
        with raises("sglang.engine-lost", "rollout rank 0", "accept: WorkerLost", error=ReplicaLost):
            asyncio.run(ask(0, "lose"))

        async def both():
            return await asyncio.gather(ask(0, "die"), ask(1, "c"), return_exceptions=True)

        lost, answered = asyncio.run(both())
        assert isinstance(lost, ReplicaLost) and f"rollout rank 0 (pid {pids[0]}" in lost.text
        assert lost.code == "worker.died"
        assert answered == [(1, True, "c")]
        group.restart([0])
        replicas = replica_processes(group)
        assert asyncio.run(ask(0, "d")) == [(0, False, "d")]
        (new,) = group.submit_on([0], "init_model").result()
        assert new not in pids and asyncio.run(ask(0, "e")) == [(0, True, "e")]
        assert group.init_model() == [new, pids[1]]
        with pytest.raises(TypeError, match="use handle"):
            group.submit("accept", "router", [], [])

        # A frozen process does not answer, so the router's time limit finds it; its replacement ends it.
        frozen = psutil.Process(new)
        frozen.suspend()

        async def route():
            async with Router({0: replicas[0]}, 1, timeout_s=1.0) as router:
                await router.generate([1], SamplingParams(1), seed=0)

        with raises("rollout.no-replica-left", "no answer within 1 s", error=NoReplicaLeft):
            asyncio.run(route())
        group.restart([0])
        assert group.submit_on([0], "init_model").result() != [new]
        wait_for_ends([frozen], 30)
        assert not frozen.is_running()
