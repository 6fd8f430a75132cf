"""Runs a reshard plan: the trainer's weights into every rollout engine, and the device from hand to hand."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from megarl.errors import WeightSyncError
from megarl.sharding.plan import ReshardPlan
from megarl.sharding.verification import check_shares

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""What an engine can put away, by the names of the engine contract."""


class Pending(Protocol):
    """Something under way in other processes."""

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Waits for it; raises what it raised, or that it takes longer than so many seconds."""


class SyncSource(Protocol):
    """All training ranks together."""

    def make_room(self) -> Pending:
        """Gives back, on shared devices, what a sync does not need and the configuration lets go."""

    def open_transfer(self, session: int) -> Pending:
        """Gets ready to send; meets the target where ``session`` is new."""

    def export_bucket(self, index: int) -> Pending:
        """Starts packing bucket ``index`` on every rank; the result is meant for the target, by whatever way."""

    def release_bucket(self, index: int) -> object:
        """The target has read bucket ``index``; not waited for. Harmless where nothing was packed."""

    def checksums(self) -> Pending:
        """By rank, :data:`~megarl.sharding.verification.Shares` that together count each element once."""

    def close_transfer(self, completed: bool) -> Pending:
        """Nothing more is sent; weights that are not to stay leave the device. Peak bytes by rank."""


class SyncTarget(Protocol):
    """All rollout ranks together."""

    def sleep(self, tags: tuple[str, ...]) -> Pending:
        """Frees what the tags name on every engine."""

    def wake(self, tags: tuple[str, ...]) -> Pending:
        """Makes what was freed usable again."""

    def begin_update(self, version: int) -> Pending:
        """Makes every engine stale: it serves nothing until ``end_update``."""

    def open_transfer(self, session: int) -> Pending:
        """Gets ready to receive; meets the source where ``session`` is new."""

    def import_bucket(self, index: int, exported: Any) -> Pending:
        """Writes what the source's ``export_bucket`` returned, waiting for it where needed."""

    def checksums(self) -> Pending:
        """By rank, :data:`~megarl.sharding.verification.Shares` of what the engine holds."""

    def close_transfer(self, completed: bool) -> Pending:
        """Nothing more is received. Peak bytes by rank."""

    def end_update(self, version: int) -> Pending:
        """Makes every engine serve the new weights; raises where one has not received all of them."""


class SyncOptions(NamedTuple):
    """How syncs are run.

    Attributes:
        verify_freq: compare checksums at the first sync and at every so many after it; 0: never.
        free_engine: engines give their memory to the trainer while they have nothing to do.
        replica_size: rollout ranks of one replica.
        timeout_s: most seconds that any part of a sync may take; None: as long as it takes.
    """

    verify_freq: int = 0
    free_engine: bool = False
    replica_size: int = 1
    timeout_s: float | None = None


class ShardingManager:
    """Keeps the rollout engines' weights equal to the trainer's, and says who has the devices.

    Args:
        plan: which rectangles go where.
        source: the training ranks.
        target: the rollout ranks.
        options: what of it is to be done.
        version: weight version that the engines have now; each sync adds one.

    Attributes:
        in_sync: whether all engines serve the weights of the last sync: there was one, and none was freed since.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        source: SyncSource,
        target: SyncTarget,
        options: SyncOptions | None = None,
        version: int = 0,
    ) -> None:
        self.plan = plan
        self.version = version
        self.options = options or SyncOptions()
        self._source, self._target = source, target
        self._session = 0  # a new one after a failure, whose messages may still be under way
        self._completed = 0
        self.in_sync = False
        self._stage = ""
        self._verify_seconds: float | None = None

    def free_engines(self) -> None:
        """Before training: engines put weights and cache away, where they are to; they serve nothing until a sync."""
        if self.options.free_engine:
            self._target.sleep((WEIGHTS, KV_CACHE)).result(self.options.timeout_s)
            self.in_sync = False

    def sync_weights(self) -> dict[str, float]:
        """Copies all weights. While the target imports one bucket, the source exports the next.

        On a shared device at no time more is held than the weights of both sides and two buckets: the trainer gives
        way before the engine's weights wake, and takes its weights away before the cache wakes.

        Returns:
            ``weight_sync/seconds``, ``weight_sync/bytes`` (over all ranks), ``weight_sync/buckets``,
            ``weight_sync/peak_mb`` (besides weights, of the process that holds most) and ``weight_sync/gb_per_s``;
            ``weight_sync/verified``, 1 where checksums were compared, else 0, and where they were
            ``weight_sync/verify_seconds``.

        Raises:
            WeightSyncError: anything failed. The engines stay stale and the version is what it was; a later call
                starts again from the first bucket.
        """
        started, version = time.perf_counter(), self.version + 1
        try:
            peak = self._run(version)
        except BaseException as error:
            self._give_up(version)
            if not isinstance(error, Exception):
                raise
            raise WeightSyncError(
                f"weight sync to version {version} failed at {self._stage}; the rollout engines are stale and serve "
                f"nothing: {error}"
            ) from error
        self.version, self._completed, self.in_sync = version, self._completed + 1, True
        return self._metrics(time.perf_counter() - started, peak)

    def _run(self, version: int) -> int:
        """One sync; returns the peak bytes of the process that held most."""
        source, target, session = self._source, self._target, self._session
        self._do("make_room", source.make_room)
        if self.options.free_engine:
            self._do("wake weights", partial(target.wake, (WEIGHTS,)))
        self._do("begin_update", partial(target.begin_update, version))
        self._do("open_transfer", partial(source.open_transfer, session), partial(target.open_transfer, session))
        self._move_buckets()
        self._verify_seconds = self._verify() if self._verification_due() else None
        # The target first: it lets go of the source's memory.
        peaks = [self._do("close_transfer", partial(end.close_transfer, True))[0] for end in (target, source)]
        if self.options.free_engine:
            self._do("wake kv_cache", partial(target.wake, (KV_CACHE,)))
        self._do("end_update", partial(target.end_update, version))
        return max(itertools.chain(*peaks), default=0)

    def _move_buckets(self) -> None:
        """At any time two buckets are on the way, so that neither side waits for this process's orders."""
        count = len(self.plan.buckets)
        imported: list[Pending] = []
        for index in range(count):
            for ahead in range(len(imported), min(index + 2, count)):
                self._stage = f"bucket {ahead + 1} of {count}"
                imported.append(self._target.import_bucket(ahead, self._source.export_bucket(ahead)))
            self._stage = f"bucket {index + 1} of {count}"
            imported[index].result(self.options.timeout_s)
            self._source.release_bucket(index)

    def _give_up(self, version: int) -> None:
        """Has both sides drop the sync, and engines that had already ended it be stale again; waits for nothing."""
        self._session += 1
        ends: list[SyncSource | SyncTarget] = [self._target, self._source]
        for start in (
            *(partial(end.close_transfer, False) for end in ends),
            partial(self._target.begin_update, version),
        ):
            # What matters now is the failure, not whether its clean-up worked as well.
            with contextlib.suppress(Exception):
                start()

    def _verify(self) -> float:
        """Compares what both sides hold; returns the seconds that it took."""
        started = time.perf_counter()
        trainer, rollout = self._do("verification", self._source.checksums, self._target.checksums)
        check_shares(trainer, rollout, self.options.replica_size)
        return time.perf_counter() - started

    def _verification_due(self) -> bool:
        return self.options.verify_freq > 0 and self._completed % self.options.verify_freq == 0

    def _metrics(self, seconds: float, peak: int) -> dict[str, float]:
        verify_seconds = self._verify_seconds
        return {
            "weight_sync/seconds": seconds,
            "weight_sync/bytes": float(self.plan.nbytes),
            "weight_sync/buckets": float(len(self.plan.buckets)),
            "weight_sync/peak_mb": peak / 2**20,
            "weight_sync/gb_per_s": self.plan.nbytes / 1e9 / seconds,
            "weight_sync/verified": float(verify_seconds is not None),
            **({} if verify_seconds is None else {"weight_sync/verify_seconds": verify_seconds}),
        }

    def _do(self, stage: str, *starts: Callable[[], Pending]) -> list[Any]:
        """Starts things side by side and waits for all; names what is being done, for the error."""
        self._stage = stage
        return [pending.result(self.options.timeout_s) for pending in [start() for start in starts]]
