"""The sharding manager: runs weight syncs and passes shared devices between trainer and rollout engines."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from megarl.base.errors import MegarlError, WeightSyncError
from megarl.cluster.calls import PendingCall, ScatteredCall
from megarl.cluster.worker_group import WorkerGroup
from megarl.rollout.serving import HeldRequests
from megarl.sharding.plan import ReshardPlan, SyncWave, TransferUsage
from megarl.sharding.verification import PartialChecksums, compare_checksums

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Sleep tags of the engine contract."""

_Start = Callable[[], PendingCall]

IN_FLIGHT = 2
"""Buckets in flight: the source packs one while the target imports the other."""


class SyncOptions(NamedTuple):
    """Options of weight syncs.

    Attributes:
        verify_freq: compare checksums at the first sync and at every ``verify_freq``-th one after it; 0 = never.
        free_engine: engines free their memory for the trainer while they are idle.
        sleepers: ranks of the engines that do so, since they share devices with the trainer; None = all.
        timeout_s: maximum seconds of a sync stage; None = no limit.
        answer_s: maximum seconds for a replica to interrupt or continue its requests; None = ``timeout_s``.
    """

    verify_freq: int = 0
    free_engine: bool = False
    sleepers: Collection[int] | None = None
    timeout_s: float | None = None
    answer_s: float | None = None


class ShardingManager:
    """Runs weight syncs from the actor to the rollout replicas, and passes shared devices between them.

    A replica is one process of the rollout group, which represents all ranks of the replica. The plan counts the
    replicas that are present: its replica ``n`` is the rank ``members[n]`` of the group. A failed replica does not keep
    the others from holding their requests and aborting an update.

    Args:
        actor: the training ranks; their workers have the verbs of :class:`megarl.workers.actor.ActorWorker`.
        rollout: the replicas; their workers have the verbs of :class:`megarl.workers.rollout.RolloutWorker`.
        members: ranks of the present replicas; None = those of now.
        version: current weight version of the engines; each sync adds one.

    Attributes:
        in_sync: whether all engines serve the weights of the last sync, and none was freed since then.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        options: SyncOptions | None = None,
        members: Sequence[int] | None = None,
        version: int = 0,
    ) -> None:
        self.plan = plan
        self.version = version
        self.options = options or SyncOptions()
        self._actor, self._rollout = actor, rollout
        self._members = list(rollout.ranks if members is None else members)
        self._session = 0  # a new one after a failure, since old messages may still be in flight
        self._has_met = False
        self._completed = 0
        self.in_sync = False
        self._stage = ""
        self._verify_seconds: float | None = None
        self._pauses: list[float] = []

    def pause_engines(self) -> None:
        """Interrupt all requests, and free the engines' memory for training if configured."""
        self._to(self._members, "pause", after_failure=True)().result(self.options.answer_s or self.options.timeout_s)
        self.free_engines()

    def free_engines(self) -> None:
        """Put the engines to sleep before training, if configured; they serve nothing until the next sync."""
        if self.options.free_engine:
            self._to(self._sleepers(self._members), "sleep", (WEIGHTS, KV_CACHE))().result(self.options.timeout_s)
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

    def sync_weights_in_flight(self) -> tuple[dict[str, float], list[HeldRequests]]:
        """Copy all weights into the engines between two tokens of their requests (rolling sync).

        A wave of replicas at a time holds its requests; the other replicas generate. All replicas are one wave in
        the first sync and in the first one after a failure, in which all processes meet. After an error, see
        :meth:`sync_weights`, all requests stay held.

        Returns:
            The metrics of :meth:`sync_weights` and ``weight_sync/pause_s``, the longest pause of a replica; and the
            interrupted requests of each replica.
        """
        paused: list[HeldRequests] = []
        return self._sync(paused), paused

    def _sync(self, paused: list[HeldRequests] | None) -> dict[str, float]:
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

    def _run(self, version: int, paused: list[HeldRequests] | None) -> list[TransferUsage]:
        """Run the waves of one sync; return the usage of every process."""
        waves = self.plan.waves
        rolls = paused is not None and self._has_met
        rounds = [[wave] for wave in waves] if rolls else [list(waves)]
        usage: list[TransferUsage] = []
        self._run_stage("make_room", self._from("make_room"))
        expected: list[PartialChecksums] | None = None
        for part in rounds:
            ranks = self._members[part[0].replicas.start : part[-1].replicas.stop]
            with self._interrupting(ranks, paused):
                if self.options.free_engine:
                    self._run_stage("wake weights", self._to(self._sleepers(ranks), "wake", (WEIGHTS,)))
                exported = self._begin(ranks, version, part[0].buckets, opens_source=part is rounds[0])
                for wave in part:
                    self._transfer_buckets(wave, exported)
                if self.options.verify_freq > 0 and self._completed % self.options.verify_freq == 0:
                    expected = self._verify(ranks, expected)
                (received,) = self._run_stage("close_transfer", self._to(ranks, "close_transfer", True))
                usage += itertools.chain(*received)
                if part is rounds[-1]:  # after the target, which releases the source's memory
                    usage += self._run_stage("close_transfer", self._from("close_transfer", True))[0]
                if self.options.free_engine:
                    self._run_stage("wake kv_cache", self._to(self._sleepers(ranks), "wake", (KV_CACHE,)))
                self._run_stage("end_update", self._to(ranks, "end_update", version))
        return usage

    @contextlib.contextmanager
    def _interrupting(self, ranks: Sequence[int], paused: list[HeldRequests] | None) -> Iterator[None]:
        """Hold the requests of some replicas during the block; an error leaves them held."""
        if paused is None:
            yield
            return
        started, answer_s = time.perf_counter(), self.options.answer_s
        paused += self._run_stage("pause", self._to(ranks, "pause", after_failure=True), timeout_s=answer_s)[0]
        yield
        self._run_stage("resume", self._to(ranks, "resume"), timeout_s=answer_s)
        self._pauses.append(time.perf_counter() - started)

    def _begin(
        self, ranks: Sequence[int], version: int, buckets: range, *, opens_source: bool
    ) -> dict[int, ScatteredCall]:
        """Begin the update on both sides; return the first buckets, which the source packs meanwhile."""
        exported = dict[int, ScatteredCall]()
        open_source = [self._from("open_transfer", self._session)] if opens_source else []
        if self._has_met:
            # In a new session a source would wait for a target that fails to begin.
            self._run_stage("open_transfer", *open_source)
            exported = {index: self._export(index) for index in buckets[:IN_FLIGHT]}
            open_source = []
        self._run_stage("begin_update", self._to(ranks, "begin_update", version, after_failure=True))
        self._run_stage("open_transfer", *open_source, self._to(ranks, "open_transfer", self._session))
        return exported

    def _transfer_buckets(self, wave: SyncWave, exported: dict[int, ScatteredCall]) -> None:
        """Transfer the buckets of a wave; those in ``exported`` are being packed.

        :data:`IN_FLIGHT` buckets are in flight at any time, so that neither side waits for this process. The receiving
        processes wait for the packed messages, which bypass this process.
        """
        count = len(self.plan.buckets)
        imported: dict[int, PendingCall] = {}
        for index in wave.buckets:
            for ahead in range(index + len(imported), min(index + IN_FLIGHT, wave.buckets.stop)):
                self._stage = f"bucket {ahead + 1} of {count}"
                packed = exported.pop(ahead) if ahead in exported else self._export(ahead)
                imported[ahead] = self._rollout.submit_gather(
                    "import_bucket", packed, ahead, receivers=self._members, places=wave.replicas
                )
            self._stage = f"bucket {index + 1} of {count}"
            imported.pop(index).result(self.options.timeout_s)

    def _export(self, index: int) -> ScatteredCall:
        """Start packing a bucket on every training rank; the receivers have read all buckets before ``index - 1``."""
        return self._actor.submit_scatter("export_bucket", self.plan.receivers[index], self.plan.rollout.tp, index)

    def _abort(self, version: int, *, pauses: bool) -> None:
        """Abort the sync on every process that lives and make all engines stale, without waiting.

        Engines with requests hold them first, since an engine has no requests during an update.
        """
        self._session += 1
        self._has_met = False
        ranks = self._members
        for start in (
            *([self._to(ranks, "pause", after_failure=True)] if pauses else []),
            self._to(ranks, "close_transfer", False, after_failure=True),
            self._from("close_transfer", False, after_failure=True),
            self._to(ranks, "begin_update", version, after_failure=True),
        ):
            # The original failure matters, not errors of the clean-up.
            with contextlib.suppress(Exception):
                start()

    def _verify(self, ranks: Sequence[int], expected: list[PartialChecksums] | None) -> list[PartialChecksums]:
        """Compare the checksums of some replicas with the actor's, which are computed once per sync and returned."""
        started = time.perf_counter()
        starts = [self._to(ranks, "weight_shares"), *([self._from("weight_shares")] if expected is None else [])]
        replicas, *computed = self._run_stage("verification", *starts)
        trainer: list[PartialChecksums] = computed[0] if expected is None else expected
        compare_checksums(trainer, list(itertools.chain(*replicas)), self.plan.rollout.tp, ranks)
        self._verify_seconds = (self._verify_seconds or 0.0) + time.perf_counter() - started
        return trainer

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

    def _run_stage(self, stage: str, *starts: _Start, timeout_s: float | None = None) -> list[Any]:
        """Start calls in parallel and wait for all; errors name the stage."""
        self._stage = stage
        limit = self.options.timeout_s if timeout_s is None else timeout_s
        return [pending.result(limit) for pending in [start() for start in starts]]

    def _from(self, verb: str, *args: Any, after_failure: bool = False) -> _Start:
        return partial(self._actor.submit_on, self._actor.ranks, verb, *args, after_failure=after_failure)

    def _to(self, ranks: Sequence[int], verb: str, *args: Any, after_failure: bool = False) -> _Start:
        return partial(self._rollout.submit_on, ranks, verb, *args, after_failure=after_failure)

    def _sleepers(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self.options.sleepers is None or rank in self.options.sleepers]
