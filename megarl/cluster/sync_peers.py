"""Worker groups as the two ends of a weight sync (see :mod:`megarl.sharding.manager`)."""

from __future__ import annotations

from megarl.cluster.worker_group import Pending, Scattered, WorkerGroup


class GroupSource:
    """The training ranks: a group whose workers have ``export_bucket(index)`` and ``release_bucket(index)``.

    Args:
        group: the training role.
        destinations: number of rollout ranks.
    """

    def __init__(self, group: WorkerGroup, destinations: int) -> None:
        self._group = group
        self._destinations = destinations

    def export_bucket(self, index: int) -> Scattered:
        """Starts packing bucket ``index`` on every rank; each shipment becomes an object of its own in Ray."""
        return self._group.submit_scatter("export_bucket", self._destinations, index)

    def release_bucket(self, index: int) -> Pending:
        """Frees what was packed for bucket ``index``."""
        return self._group.submit("release_bucket", index)


class GroupTarget:
    """The rollout ranks, numbered ``replica * tp + tp_rank``: a group of layout ``(tp, dp=replicas)``.

    Its workers have ``begin_update(version)``, ``import_bucket(index, shipments)`` and ``end_update(version)``.

    Args:
        group: the rollout role.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def begin_update(self, version: int) -> Pending:
        """Makes every engine stale."""
        return self._group.submit("begin_update", version)

    def import_bucket(self, index: int, exported: Scattered) -> Pending:
        """Writes what the source exported; waits for it on the receiving process, not here."""
        return self._group.submit_gather("import_bucket", exported, index)

    def end_update(self, version: int) -> Pending:
        """Makes every engine serve the new weights."""
        return self._group.submit("end_update", version)
