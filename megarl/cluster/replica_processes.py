"""The processes of a rollout group as the router's replicas; see :mod:`megarl.rollout.router` for the interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.cluster.calls import RankHandle
from megarl.cluster.failures import WorkerCall, WorkerFailed
from megarl.cluster.worker_group import WorkerGroup
from megarl.rollout.interface import Completion, Request
from megarl.rollout.router import ReplicaLost


class ReplicaProcess:
    """The process of a rollout replica, for the router; can be sent to other processes.

    Args:
        handle: on the process, whose worker has the verbs ``accept``, ``completions`` and ``forget``.
    """

    def __init__(self, handle: RankHandle) -> None:
        self._handle = handle

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same process; a replacement is another one."""
        return isinstance(other, ReplicaProcess) and self._handle.actor == other._handle.actor

    def __hash__(self) -> int:
        return hash(self._handle.actor)

    async def accept(self, client: str, requests: Sequence[Request], aborted: Sequence[str]) -> None:
        """Send requests to the engine; see :meth:`megarl.rollout.router.Replica.accept`."""
        await self._call("accept", client, requests, aborted)

    async def completions(self, client: str, wait_s: float) -> list[Completion]:
        """Return finished requests; see :meth:`megarl.rollout.router.Replica.completions`."""
        done: list[Completion] = await self._call("completions", client, wait_s)
        return done

    def forget(self, client: str) -> WorkerCall:
        """Start to abort the requests of a client that is gone."""
        return self._handle.submit("forget", client)

    async def _call(self, verb: str, *args: Any) -> Any:
        try:
            return await self._handle.call(verb, *args)
        except WorkerFailed as failure:
            if failure.died:
                raise ReplicaLost(failure.text, code=failure.code) from failure
            raise


def replica_processes(group: WorkerGroup) -> dict[int, ReplicaProcess]:
    """Return the present replicas of a rollout group by rank, each a process."""
    return {rank: ReplicaProcess(group.handle(rank)) for rank in group.ranks}
