"""Worker groups as the two ends of a weight sync (see :mod:`megarl.sharding.manager`)."""

from __future__ import annotations

from typing import Any

from megarl.cluster.worker_group import Pending, Scattered, WorkerGroup


class GroupSource:
    """The training ranks: a group whose workers have the verbs named here, and ``weight_shares()``.

    Args:
        group: the training role.
        destinations: number of rollout ranks, of all replicas together.
    """

    def __init__(self, group: WorkerGroup, destinations: int) -> None:
        self._group = group
        self._destinations = destinations

    def make_room(self) -> Pending:
        """What may leave the devices leaves them."""
        return self._group.submit("make_room")

    def open_transfer(self, session: int) -> Pending:
        """Gets ready to send."""
        return self._group.submit("open_transfer", session)

    def checksums(self) -> Pending:
        """What every rank holds, each element once."""
        return self._group.submit("weight_shares")

    def close_transfer(self, completed: bool) -> Pending:
        """Nothing more is sent."""
        return self._group.submit("close_transfer", completed)

    def export_bucket(self, index: int) -> Scattered:
        """Starts packing bucket ``index`` on every rank; each shipment becomes an object of its own in Ray."""
        return self._group.submit_scatter("export_bucket", self._destinations, index)

    def release_bucket(self, index: int) -> Pending:
        """Frees what was packed for bucket ``index``."""
        return self._group.submit("release_bucket", index)


class GroupTarget:
    """The rollout ranks: a group with one process per replica, which speaks for all of the replica's ranks.

    Its workers have the verbs named here, ``import_bucket`` with the shipments to all of its ranks as second argument,
    and ``weight_shares()``, which answers by rank.

    Args:
        group: the rollout role.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def sleep(self, tags: tuple[str, ...]) -> Pending:
        """Frees what the tags name."""
        return self._group.submit("sleep", tags)

    def wake(self, tags: tuple[str, ...]) -> Pending:
        """Makes what was freed usable again."""
        return self._group.submit("wake", tags)

    def open_transfer(self, session: int) -> Pending:
        """Gets ready to receive."""
        return self._group.submit("open_transfer", session)

    def checksums(self) -> RankByRank:
        """What every rank holds."""
        return RankByRank(self._group.submit("weight_shares"))

    def close_transfer(self, completed: bool) -> Pending:
        """Nothing more is received."""
        return self._group.submit("close_transfer", completed)

    def begin_update(self, version: int) -> Pending:
        """Makes every engine stale."""
        return self._group.submit("begin_update", version)

    def import_bucket(self, index: int, exported: Scattered) -> Pending:
        """Writes what the source exported; waits for it on the receiving process, not here."""
        return self._group.submit_gather("import_bucket", exported, index)

    def end_update(self, version: int) -> Pending:
        """Makes every engine serve the new weights."""
        return self._group.submit("end_update", version)


class RankByRank:
    """Answers by rank, of a call whose processes answer for several ranks each.

    Args:
        pending: the call; each process's answer is a list.
    """

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Waits for all processes; raises as :meth:`Pending.result`."""
        return [answer for process in self._pending.result(timeout_s) for answer in process]
