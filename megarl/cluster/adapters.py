"""Adapters: worker groups as the router's replicas and as the two ends of a weight sync.

See :mod:`megarl.rollout.router` and :mod:`megarl.sharding.manager` for the interfaces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megarl.cluster.calls import PendingCall, RankHandle, ScatteredCall
from megarl.cluster.failures import WorkerCall, WorkerFailed
from megarl.cluster.worker_group import WorkerGroup
from megarl.rollout.interface import Completion, Request
from megarl.rollout.router import ReplicaLost


class GroupSource:
    """The training ranks of a weight sync: a group whose workers have the verbs used here.

    Args:
        group: the training role.
        destinations: number of rollout ranks over all replicas.
    """

    def __init__(self, group: WorkerGroup, destinations: int) -> None:
        self._group = group
        self._destinations = destinations

    def make_room(self) -> PendingCall:
        """Offload the parts that may leave the devices."""
        return self._group.submit("make_room")

    def open_transfer(self, session: int) -> PendingCall:
        """Prepare to send."""
        return self._group.submit("open_transfer", session)

    def checksums(self) -> PendingCall:
        """Return the partial checksums of every rank's weights; each element counts once."""
        return self._group.submit("weight_shares")

    def close_transfer(self, completed: bool) -> PendingCall:
        """End the transfer on the senders; one that was aborted, also in a failed group."""
        return self._group.submit_on(self._group.ranks, "close_transfer", completed, after_failure=not completed)

    def export_bucket(self, index: int) -> ScatteredCall:
        """Start packing bucket ``index`` on every rank; each message becomes a separate Ray object."""
        return self._group.submit_scatter("export_bucket", self._destinations, index)


class GroupTarget:
    """The rollout ranks of a weight sync: a group with one process per replica.

    The process represents all ranks of the replica. Its workers have the verbs used here. ``import_bucket`` takes the
    messages to all of the replica's ranks as second argument. ``weight_shares`` and ``close_transfer`` return lists.

    The plan counts the replicas that are present: its replica ``n`` is the rank ``members[n]`` of the group. A failed
    replica does not keep the others from holding their requests and aborting an update.

    Args:
        group: the rollout role.
        members: ranks of the present replicas; None = those of now.
        sleepers: ranks that sleep and wake, since they share devices with the trainer; None = all.
        replicas: numbers of the plan's replicas; None = all.
    """

    def __init__(
        self,
        group: WorkerGroup,
        members: Sequence[int] | None = None,
        sleepers: Collection[int] | None = None,
        replicas: range | None = None,
    ) -> None:
        self._group, self._sleepers = group, sleepers
        self._members = group.ranks if members is None else members
        self._replicas = range(len(self._members)) if replicas is None else replicas

    @property
    def numbers(self) -> list[int]:
        """Ranks of the replicas."""
        return [self._members[replica] for replica in self._replicas]

    def of_replicas(self, replicas: range) -> GroupTarget:
        """Return the ranks of some replicas."""
        return GroupTarget(self._group, self._members, self._sleepers, replicas)

    def pause(self) -> PendingCall:
        """Interrupt all requests and hold them."""
        return self._submit("pause", after_failure=True)

    def resume(self) -> PendingCall:
        """Continue the held requests."""
        return self._submit("resume")

    def sleep(self, tags: tuple[str, ...]) -> PendingCall:
        """Release the memory that the tags name."""
        return self._group.submit_on(self._sleeping(), "sleep", tags)

    def wake(self, tags: tuple[str, ...]) -> PendingCall:
        """Take back the memory that the tags name."""
        return self._group.submit_on(self._sleeping(), "wake", tags)

    def open_transfer(self, session: int) -> PendingCall:
        """Prepare to receive."""
        return self._submit("open_transfer", session)

    def checksums(self) -> ResultsByRank:
        """Return the partial checksums of every rank's weights."""
        return ResultsByRank(self._submit("weight_shares"))

    def close_transfer(self, completed: bool) -> ResultsByRank:
        """End the transfer on the receivers."""
        return ResultsByRank(self._submit("close_transfer", completed, after_failure=not completed))

    def begin_update(self, version: int) -> PendingCall:
        """Mark every engine's weights as stale."""
        return self._submit("begin_update", version, after_failure=True)

    def import_bucket(self, index: int, exported: ScatteredCall) -> PendingCall:
        """Write the bucket that the source exported; the receiving process waits for it, not the driver."""
        return self._group.submit_gather(
            "import_bucket", exported, index, receivers=self._members, places=self._replicas
        )

    def end_update(self, version: int) -> PendingCall:
        """Let every engine serve the new weights."""
        return self._submit("end_update", version)

    def _sleeping(self) -> list[int]:
        return [rank for rank in self.numbers if self._sleepers is None or rank in self._sleepers]

    def _submit(self, verb: str, *args: Any, after_failure: bool = False) -> PendingCall:
        return self._group.submit_on(self.numbers, verb, *args, after_failure=after_failure)


class ResultsByRank:
    """Results of a call whose processes each return a list, such as one entry per rank, as one list.

    Args:
        pending: the call.
    """

    def __init__(self, pending: PendingCall) -> None:
        self._pending = pending

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all processes; raises like :meth:`PendingCall.result`."""
        return [answer for process in self._pending.result(timeout_s) for answer in process]


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
