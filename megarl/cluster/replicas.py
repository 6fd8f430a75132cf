"""Rollout replicas in Ray's processes, as the router sees them."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.cluster.failures import WorkerFailed
from megarl.cluster.worker_group import WorkerGroup
from megarl.rollout.interface import Completion, Request
from megarl.rollout.router import ReplicaLost


class GroupReplica:
    """One replica of a rollout group.

    Args:
        group: its workers have the verb ``exchange``; each speaks for one replica.
        replica: number of the replica.
    """

    def __init__(self, group: WorkerGroup, replica: int) -> None:
        self._group, self._replica = group, replica

    async def exchange(self, requests: Sequence[Request], aborted: Sequence[str], slice_s: float) -> list[Completion]:
        """See :meth:`megarl.rollout.router.Replica.exchange`."""
        try:
            done: list[Completion] = await self._group.call_on(self._replica, "exchange", requests, aborted, slice_s)
        except WorkerFailed as failure:
            if failure.died:
                raise ReplicaLost(str(failure)) from failure
            raise
        return done
