"""Runs a reshard plan: the trainer's weights into every rollout engine, bucket by bucket."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Protocol

from megarl.errors import WeightSyncError
from megarl.sharding.plan import ReshardPlan


class Pending(Protocol):
    """Something under way in other processes."""

    def result(self) -> Any:
        """Waits for it; raises what it raised."""


class SyncSource(Protocol):
    """All training ranks together."""

    def export_bucket(self, index: int) -> Pending:
        """Starts packing bucket ``index`` on every rank; the result is meant for the target, by whatever way."""

    def release_bucket(self, index: int) -> object:
        """Frees what was packed for bucket ``index``; not waited for. Harmless where nothing was packed."""


class SyncTarget(Protocol):
    """All rollout ranks together."""

    def begin_update(self, version: int) -> Pending:
        """Makes every engine stale: it serves nothing until ``end_update``."""

    def import_bucket(self, index: int, exported: Any) -> Pending:
        """Writes what the source's ``export_bucket`` returned, waiting for it where needed."""

    def end_update(self, version: int) -> Pending:
        """Makes every engine serve the new weights; raises where one has not received all of them."""


class ShardingManager:
    """Keeps the rollout engines' weights equal to the trainer's.

    Args:
        plan: which rectangles go where.
        source: the training ranks.
        target: the rollout ranks.
        version: weight version that the engines have now; each sync adds one.
    """

    def __init__(self, plan: ReshardPlan, source: SyncSource, target: SyncTarget, version: int = 0) -> None:
        self.plan = plan
        self.version = version
        self._source = source
        self._target = target

    def sync_weights(self) -> dict[str, float]:
        """Copies all weights. While the target imports one bucket, the source exports the next.

        Returns:
            ``weight_sync/seconds``, ``weight_sync/bytes`` (over all ranks) and ``weight_sync/buckets``.

        Raises:
            WeightSyncError: anything failed. The engines stay stale and the version is what it was; a later call
                starts again from the first bucket.
        """
        started = time.perf_counter()
        version = self.version + 1
        stage = "begin_update"
        exported: dict[int, Pending] = {}
        try:
            self._target.begin_update(version).result()
            for index in range(len(self.plan.buckets)):
                stage = f"bucket {index + 1} of {len(self.plan.buckets)}"
                self._import_bucket(index, exported)
            stage = "end_update"
            self._target.end_update(version).result()
        except Exception as error:
            raise WeightSyncError(
                f"weight sync to version {version} failed at {stage}; the rollout engines are stale and serve "
                f"nothing: {error}"
            ) from error
        finally:
            for index in exported:
                # Only after a failure; what matters then is the failure, not whether its clean-up worked as well.
                with contextlib.suppress(Exception):
                    self._source.release_bucket(index)
        self.version = version
        return {
            "weight_sync/seconds": time.perf_counter() - started,
            "weight_sync/bytes": float(self.plan.nbytes),
            "weight_sync/buckets": float(len(self.plan.buckets)),
        }

    def _import_bucket(self, index: int, exported: dict[int, Pending]) -> None:
        for ahead in range(index, min(index + 2, len(self.plan.buckets))):
            if ahead not in exported:
                exported[ahead] = self._source.export_bucket(ahead)
        self._target.import_bucket(index, exported[index]).result()
        self._source.release_bucket(index)
        del exported[index]
