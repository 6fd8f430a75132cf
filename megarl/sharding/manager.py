"""The sharding manager: runs weight syncs and passes shared devices between trainer and rollout engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from megarl.base.errors import MegarlError, WeightSyncError
from megarl.sharding.plan import ReshardPlan, SyncWave, TransferUsage
from megarl.sharding.verification import PartialChecksums, compare_checksums

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Sleep tags of the engine contract."""

IN_FLIGHT = 2
"""Buckets in flight: the source packs one while the target imports the other."""


class PendingResult(Protocol):
    """A call running in other processes."""

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Wait for the call and return its result; raise its error, or a timeout error after ``timeout_s`` seconds."""


class SyncSource(Protocol):
    """All training ranks together: the sending side of a weight sync."""

    def make_room(self) -> PendingResult:
        """Free device memory on shared devices, as far as the sync does not need it and the config allows it."""

    def open_transfer(self, session: int) -> PendingResult:
        """Prepare to send; join the target's process group for a new ``session``."""

    def export_bucket(self, index: int) -> PendingResult:
        """Start packing bucket ``index`` on every rank; the result is an argument of ``import_bucket``.

        The target has read all buckets before ``index - 1``; their memory is free.
        """

    def checksums(self) -> PendingResult:
        """Return :data:`~megarl.sharding.verification.PartialChecksums` by rank, which count each element once in
        total.
        """

    def close_transfer(self, completed: bool) -> PendingResult:
        """End the sync; offload the weights if configured. The result is the :class:`TransferUsage` by rank."""


class SyncTarget(Protocol):
    """All rollout ranks together: the receiving side of a weight sync."""

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the replicas in the run, of which some may be absent; for errors."""

    def of_replicas(self, replicas: range) -> SyncTarget:
        """Return the ranks of some replicas as a target of their own."""

    def pause(self) -> PendingResult:
        """Interrupt all requests and hold them; the result is a :class:`PausedRequests` per replica.

        This call, ``begin_update`` and an aborting ``close_transfer`` also start after a replica has failed.
        """

    def resume(self) -> PendingResult:
        """Continue the held requests."""

    def sleep(self, tags: tuple[str, ...]) -> PendingResult:
        """Free the memory of these tags on every engine."""

    def wake(self, tags: tuple[str, ...]) -> PendingResult:
        """Allocate the memory of these tags again."""

    def begin_update(self, version: int) -> PendingResult:
        """Make every engine stale: it refuses requests until ``end_update``."""

    def open_transfer(self, session: int) -> PendingResult:
        """Prepare to receive; join the source's process group for a new ``session``."""

    def import_bucket(self, index: int, exported: Any) -> PendingResult:
        """Write the result of the source's ``export_bucket`` into the engines, after waiting for it if needed."""

    def checksums(self) -> PendingResult:
        """Return :data:`~megarl.sharding.verification.PartialChecksums` of the engines' weights by rank."""

    def close_transfer(self, completed: bool) -> PendingResult:
        """End the sync. The result is the :class:`TransferUsage` of each receiving process."""

    def end_update(self, version: int) -> PendingResult:
        """Make every engine serve the new weights; raises if an engine misses any."""


class PausedRequests(Protocol):
    """The requests that a pause interrupted at one replica."""

    @property
    def requests(self) -> int:
        """Number of requests with tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of their prompts and responses, which the next weights compute again."""


class SyncOptions(NamedTuple):
    """Options of weight syncs.

    Attributes:
        verify_freq: compare checksums at the first sync and at every ``verify_freq``-th one after it; 0 = never.
        free_engine: engines free their memory for the trainer while they are idle.
        replica_size: rollout ranks of one replica.
        timeout_s: maximum seconds of each stage of a sync; None = no limit.
        answer_s: maximum seconds for a replica to interrupt or continue its requests; None = ``timeout_s``.
    """

    verify_freq: int = 0
    free_engine: bool = False
    replica_size: int = 1
    timeout_s: float | None = None
    answer_s: float | None = None


class ShardingManager:
    """Runs weight syncs from the trainer to the rollout engines, and passes shared devices between them.

    Args:
        plan: reshard plan.
        source: the training ranks.
        target: the rollout ranks.
        options: options of the syncs.
        version: current weight version of the engines; each sync adds one.

    Attributes:
        in_sync: whether all engines serve the weights of the last sync, and none was freed since then.
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
        self._session = 0  # a new one after a failure, since old messages may still be in flight
        self._has_met = False
        self._completed = 0
        self.in_sync = False
        self._stage = ""
        self._verify_seconds: float | None = None
        self._pauses: list[float] = []

    def pause_engines(self) -> None:
        """Interrupt all requests, and free the engines' memory for training if configured."""
        self._target.pause().result(self.options.answer_s or self.options.timeout_s)
        self.free_engines()

    def free_engines(self) -> None:
        """Put the engines to sleep before training, if configured; they serve nothing until the next sync."""
        if self.options.free_engine:
            self._target.sleep((WEIGHTS, KV_CACHE)).result(self.options.timeout_s)
            self.in_sync = False

    def sync_weights(self) -> dict[str, float]:
        """Copy all weights into the engines, which have no requests.

        The source exports the next bucket while the target imports one. A shared device never holds more than the
        weights of both sides and two buckets. The trainer frees its memory before the engine's weights wake, and
        offloads its weights before the KV cache wakes.

        Returns:
            ``weight_sync/seconds``; ``weight_sync/bytes`` over all ranks; ``weight_sync/buckets``;
            ``weight_sync/peak_mb``, the largest extra memory of a process besides weights; ``weight_sync/gb_per_s``;
            ``weight_sync/verified``, 1 after a checksum comparison, else 0; and, after a comparison,
            ``weight_sync/verify_seconds``.

        Raises:
            WeightSyncError: a stage failed. The engines stay stale and the version does not change; the next call
                starts again from the first bucket.
        """
        return self._sync(None)

    def sync_weights_in_flight(self) -> tuple[dict[str, float], list[PausedRequests]]:
        """Copy all weights into the engines between two tokens of their requests (rolling sync).

        A wave of replicas at a time holds its requests; the other replicas generate. All replicas are one wave in
        the first sync and in the first one after a failure, in which all processes meet.

        Returns:
            The metrics of :meth:`sync_weights` and ``weight_sync/pause_s``, the longest pause of a replica; and the
            interrupted requests of each replica.

        Raises:
            WeightSyncError: see :meth:`sync_weights`; all requests stay held.
        """
        paused: list[PausedRequests] = []
        return self._sync(paused), paused

    def _sync(self, paused: list[PausedRequests] | None) -> dict[str, float]:
        """Run one sync; ``paused`` gets the interrupted requests, None = there are no requests."""
        started, version = time.perf_counter(), self.version + 1
        self._verify_seconds, self._pauses = None, []
        try:
            usage = self._run(version, paused)
        except BaseException as error:
            self._abort(version, pauses=paused is not None)
            if not isinstance(error, Exception):
                raise
            raise WeightSyncError(
                f"weight sync to version {version} failed at {self._stage}; the rollout engines are stale and serve "
                f"nothing: {error.text if isinstance(error, MegarlError) else error}",
                code="sync.failed",
            ) from error
        self.version, self._completed, self.in_sync = version, self._completed + 1, True
        self._has_met = True
        return self._metrics(time.perf_counter() - started, usage)

    def _run(self, version: int, paused: list[PausedRequests] | None) -> list[TransferUsage]:
        """Run the waves of one sync; return the usage of every process."""
        source, waves = self._source, self.plan.waves
        rolls = paused is not None and self._has_met
        rounds = [[wave] for wave in waves] if rolls else [list(waves)]
        usage: list[TransferUsage] = []
        self._run_stage("make_room", source.make_room)
        expected: list[PartialChecksums] | None = None
        for part in rounds:
            replicas = range(part[0].replicas.start, part[-1].replicas.stop)
            target = self._target.of_replicas(replicas)
            with self._interrupting(target, paused):
                if self.options.free_engine:
                    self._run_stage("wake weights", partial(target.wake, (WEIGHTS,)))
                exported = self._begin(target, version, part[0].buckets, opens_source=part is rounds[0])
                for wave in part:
                    self._transfer_buckets(wave, exported)
                if self._verification_due():
                    expected = self._verify(target, expected)
                usage += self._run_stage("close_transfer", partial(target.close_transfer, True))[0]
                if part is rounds[-1]:  # after the target, which releases the source's memory
                    usage += self._run_stage("close_transfer", partial(source.close_transfer, True))[0]
                if self.options.free_engine:
                    self._run_stage("wake kv_cache", partial(target.wake, (KV_CACHE,)))
                self._run_stage("end_update", partial(target.end_update, version))
        return usage

    @contextlib.contextmanager
    def _interrupting(self, target: SyncTarget, paused: list[PausedRequests] | None) -> Iterator[None]:
        """Hold the requests of some replicas during the block; an error leaves them held."""
        if paused is None:
            yield
            return
        started = time.perf_counter()
        paused += self._run_stage("pause", target.pause, timeout_s=self.options.answer_s)[0]
        yield
        self._run_stage("resume", target.resume, timeout_s=self.options.answer_s)
        self._pauses.append(time.perf_counter() - started)

    def _begin(
        self, target: SyncTarget, version: int, buckets: range, *, opens_source: bool
    ) -> dict[int, PendingResult]:
        """Begin the update on both sides; return the first buckets, which the source packs meanwhile."""
        source, exported = self._source, dict[int, PendingResult]()
        ends = (source, target) if opens_source else (target,)
        if self._has_met:
            # In a new session a source would wait for a target that fails to begin.
            if opens_source:
                self._run_stage("open_transfer", partial(source.open_transfer, self._session))
            exported = {index: source.export_bucket(index) for index in buckets[:IN_FLIGHT]}
            ends = (target,)
        self._run_stage("begin_update", partial(target.begin_update, version))
        self._run_stage("open_transfer", *(partial(end.open_transfer, self._session) for end in ends))
        return exported

    def _transfer_buckets(self, wave: SyncWave, exported: dict[int, PendingResult]) -> None:
        """Transfer the buckets of a wave; those in ``exported`` are being packed.

        :data:`IN_FLIGHT` buckets are in flight at any time, so that neither side waits for this process.
        """
        target, count = self._target.of_replicas(wave.replicas), len(self.plan.buckets)
        imported: dict[int, PendingResult] = {}
        for index in wave.buckets:
            for ahead in range(index + len(imported), min(index + IN_FLIGHT, wave.buckets.stop)):
                self._stage = f"bucket {ahead + 1} of {count}"
                packed = exported.pop(ahead) if ahead in exported else self._source.export_bucket(ahead)
                imported[ahead] = target.import_bucket(ahead, packed)
            self._stage = f"bucket {index + 1} of {count}"
            imported.pop(index).result(self.options.timeout_s)

    def _abort(self, version: int, *, pauses: bool) -> None:
        """Abort the sync on every process that lives and make all engines stale, without waiting.

        Engines with requests hold them first, since an engine has no requests during an update.
        """
        self._session += 1
        self._has_met = False
        for start in (
            *((self._target.pause,) if pauses else ()),
            partial(self._target.close_transfer, False),
            partial(self._source.close_transfer, False),
            partial(self._target.begin_update, version),
        ):
            # The original failure matters, not errors of the clean-up.
            with contextlib.suppress(Exception):
                start()

    def _verify(self, target: SyncTarget, expected: list[PartialChecksums] | None) -> list[PartialChecksums]:
        """Compare the checksums of a target with the source's, which are computed once per sync and returned."""
        started = time.perf_counter()
        starts = [target.checksums] if expected is not None else [target.checksums, self._source.checksums]
        held, *computed = self._run_stage("verification", *starts)
        trainer: list[PartialChecksums] = computed[0] if expected is None else expected
        compare_checksums(trainer, held, self.options.replica_size, target.numbers)
        self._verify_seconds = (self._verify_seconds or 0.0) + time.perf_counter() - started
        return trainer

    def _verification_due(self) -> bool:
        return self.options.verify_freq > 0 and self._completed % self.options.verify_freq == 0

    def _metrics(self, seconds: float, usage: Sequence[TransferUsage]) -> dict[str, float]:
        verify_seconds = self._verify_seconds
        peak = max((process.peak_bytes for process in usage), default=0)
        return {
            "weight_sync/seconds": seconds,
            "weight_sync/bytes": float(self.plan.nbytes),
            "weight_sync/buckets": float(len(self.plan.buckets)),
            "weight_sync/peak_mb": peak / 2**20,
            "weight_sync/gb_per_s": self.plan.nbytes / 1e9 / seconds,
            "weight_sync/verified": float(verify_seconds is not None),
            **({"weight_sync/pause_s": max(self._pauses)} if self._pauses else {}),
            **({} if verify_seconds is None else {"weight_sync/verify_seconds": verify_seconds}),
        }

    def _run_stage(self, stage: str, *starts: Callable[[], PendingResult], timeout_s: float | None = None) -> list[Any]:
        """Start calls in parallel and wait for all; errors name the stage."""
        self._stage = stage
        limit = self.options.timeout_s if timeout_s is None else timeout_s
        return [pending.result(limit) for pending in [start() for start in starts]]
