"""Discrete-event simulation of asynchronous training: step time, idle ratios and staleness of each mode.

Requests enter by the admission rule of the rollout service, and batches are composed by its ledger
(:class:`~megarl.trainer.rollout_service.ledger.GroupLedger`), so simulated and real runs have the same order of work.
Engines decode with continuous batching: a step of a replica with ``c`` sequences takes ``decode_s + sequence_s * c``.
Replicas are equally loaded, as the router keeps them. Events are ends of responses, ends of updates, and weight syncs.
Hybrid replicas generate from a sync to the first update, by the decisions of the run
(:class:`~megarl.trainer.roles.hybrid_replicas.HybridReplicas`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.ops.plan.generation import GenerationTime
from megarl.ops.plan.lengths import Quantiles
from megarl.trainer.roles.hybrid_replicas import HybridReplicas
from megarl.trainer.rollout_service.ledger import AdmissionRule, GroupLedger


@dataclass(frozen=True)
class SimulatedRates:
    """Speeds of engines and trainer.

    Attributes:
        decode_s: seconds of a decode step of a replica, without its sequences.
        sequence_s: additional seconds of a decode step per running sequence.
        slots: most sequences of a replica at a time.
        token_s: device-seconds of training per response token, log-probs included.
        update_s: seconds of a mini-batch that do not shrink with more devices.
        sync_s: seconds of a weight sync.
        switch_s: seconds in which hybrid replicas return their devices to the trainer.
    """

    decode_s: float
    sequence_s: float
    slots: int
    token_s: float = 0.0
    update_s: float = 0.0
    sync_s: float = 0.0
    switch_s: float = 0.0

    @classmethod
    def of_generation(cls, generated: GenerationTime, lone_step_s: float, slots: int) -> SimulatedRates:
        """Fit the decode steps of a replica that a simulation of its queue has timed, prefill included.

        The line goes through the step of one sequence and the mean step, so the sum over all steps is exact.

        Args:
            generated: timed generation.
            lone_step_s: seconds of a decode step with one sequence.
            slots: most sequences of a replica at a time.
        """
        mean = (generated.prefill_s + generated.decode_s) / max(1, generated.steps)
        more = generated.mean_running - 1
        slope = max(0.0, mean - lone_step_s) / more if more > 0 else 0.0
        return cls(mean - slope * generated.mean_running, slope, slots)


@dataclass(frozen=True)
class SimulatedMode:
    """A mode of training and its devices.

    Attributes:
        name: for display.
        replicas: engine replicas.
        trainers: devices of the trainer.
        max_staleness: bound in weight versions; 0 = synchronous.
        sync_interval: mini-batches between weight syncs.
        shares_devices: engines and trainer have the same devices, so that engines pause during updates.
        drains: a sync waits for the end of all responses, instead of pausing them.
        sync_wave: replicas that pause at the same time during a sync; None = all.
        hybrid: replicas on the trainer's devices, which generate while the trainer waits.
    """

    name: str
    replicas: int
    trainers: int
    max_staleness: float = 0.0
    sync_interval: int = 1
    shares_devices: bool = False
    drains: bool = False
    sync_wave: int | None = None
    hybrid: int = 0

    @property
    def share_in_sync(self) -> float:
        """Share of the replicas that generate during a weight sync, on average."""
        return 1 - min(self.replicas, self.sync_wave or self.replicas) / self.replicas


@dataclass(frozen=True)
class SimulatedBatch:
    """Responses of a training step.

    Attributes:
        prompts: prompts of a step.
        samples: responses per prompt.
        lengths: distribution of the response lengths, in tokens; the same responses in every mode.
    """

    prompts: int
    samples: int
    lengths: Quantiles

    def of_step(self, step: int) -> Sequence[Sequence[int]]:
        """Return the response lengths of a step, by prompt."""
        drawn = self.lengths.sample(self.prompts * self.samples, step)
        rows: list[list[int]] = drawn.reshape(self.prompts, self.samples).tolist()
        return rows


@dataclass(frozen=True)
class SimulatedRun:
    """Means over the simulated steps after warm-up.

    Attributes:
        mode: the simulated mode.
        step_s: seconds per step.
        engine_idle: share of the engines' time without a running sequence.
        trainer_idle: share of the trainer's time without an update.
        mean_staleness: weight versions from the first token of a response to its training, over responses.
        max_staleness: the largest.
    """

    mode: SimulatedMode
    step_s: float
    engine_idle: float
    trainer_idle: float
    mean_staleness: float
    max_staleness: int


class _Engines:
    """Replicas with equal load; all running sequences advance by a token per decode step.

    Attributes:
        replicas: present replicas.
        share: share of the replicas that generate; the others pause.
    """

    def __init__(self, replicas: int, rates: SimulatedRates) -> None:
        self.replicas, self.rates = replicas, rates
        self.now = self.busy_s = 0.0
        self.share = 1.0
        self._tokens = 0.0  # decode steps since the start
        self._running: list[tuple[float, int, int]] = []  # last decode step, group and sample
        self._queue: deque[tuple[int, int, float]] = deque()  # group, sample, and tokens to decode

    @property
    def is_empty(self) -> bool:
        return not self._running and not self._queue

    def submit(self, requests: Iterable[tuple[int, int, int]]) -> None:
        """Queue requests: group, sample and tokens."""
        self._queue.extend(requests)
        self._fill()

    def resize(self, replicas: int) -> None:
        """Change the number of replicas; sequences of those that leave continue on the others, before queued ones."""
        leaving = self.replicas - replicas
        if leaving > 0:
            ordered = sorted(self._running)
            moved = [row for place, row in enumerate(ordered) if place % self.replicas < leaving]
            self._running = [row for place, row in enumerate(ordered) if place % self.replicas >= leaving]
            self._queue.extendleft((group, sample, last - self._tokens) for last, group, sample in reversed(moved))
        self.replicas = replicas
        self._fill()

    def next_end(self) -> float:
        """Time at which the next response ends; infinite while nothing runs."""
        if not self.share or not self._running:
            return math.inf
        return self.now + (self._running[0][0] - self._tokens) * self._step_s() / self.share

    def advance(self, now: float) -> None:
        """Decode until a time, at most that of the next end."""
        elapsed, self.now = now - self.now, now
        if self._running:
            self._tokens += self.share * elapsed / self._step_s()
            self.busy_s += self.share * elapsed * min(1.0, len(self._running) / self.replicas)

    def pop(self) -> tuple[int, int]:
        """Remove the response that ends now; returns its group and sample."""
        last, group, sample = heapq.heappop(self._running)
        self._tokens = last  # without rounding errors
        self._fill()
        return group, sample

    def _step_s(self) -> float:
        load = max(1.0, len(self._running) / self.replicas)
        return self.rates.decode_s + self.rates.sequence_s * load

    def _fill(self) -> None:
        free = self.replicas * self.rates.slots - len(self._running)
        for _ in range(min(free, len(self._queue))):
            group, sample, tokens = self._queue.popleft()
            heapq.heappush(self._running, (self._tokens + tokens, group, sample))


@dataclass
class _Simulation:
    mode: SimulatedMode
    rates: SimulatedRates
    batch: SimulatedBatch
    engines: _Engines = field(init=False)
    hybrid: HybridReplicas = field(init=False)
    ledger: GroupLedger = field(init=False)
    train_busy_s: float = 0.0
    staleness: list[int] = field(default_factory=list)
    _lengths: dict[int, Sequence[int]] = field(default_factory=dict)
    _update: tuple[float, list[int]] | None = None
    _finished: int = 0  # groups that wait for their update
    _is_due: bool = False  # a weight sync, which may be running
    _synced_at: float = math.inf
    _waited_s: float = 0.0  # of the trainer for samples, since the last sync

    def __post_init__(self) -> None:
        self.hybrid = HybridReplicas(range(self.mode.hybrid), self.mode.replicas)
        self.engines = _Engines(self.mode.replicas + self.mode.hybrid, self.rates)
        self.ledger = GroupLedger(AdmissionRule(self.batch.prompts, self.mode.max_staleness), self.batch.samples)
        self._admit()

    def run_until(self, version: int) -> None:
        """Simulate until a weight version is synced."""
        while self.ledger.version < version or self._is_due:
            end = self._update[0] if self._update else self._synced_at
            now = min(end, self.engines.next_end())
            assert now < math.inf, "the admission rule keeps a batch under way"
            self._advance(now)
            changed = now == end
            if now == end and self._update:
                self._end_update()
            elif now == end:
                self._end_sync()
            elif self.ledger.end_sample(*self.engines.pop()):
                self._finished, changed = self._finished + 1, True
            if self._is_due and self._synced_at == math.inf and (self.engines.is_empty or not self.mode.drains):
                self.engines.share, self._synced_at = self.mode.share_in_sync, now + self.rates.sync_s
            if changed:
                self._start_update()

    def _advance(self, now: float) -> None:
        if self._update is not None:
            self.train_busy_s += now - self.engines.now
        elif not self._is_due:
            self._waited_s += now - self.engines.now
        self.engines.advance(now)

    def _start_update(self) -> None:
        size = self.batch.prompts // self.mode.sync_interval
        if self._update is not None or self._is_due or self._finished < size:
            return
        numbers = self.ledger.next_batch(size)
        if numbers is None:
            return
        self._finished -= size
        tokens = sum(sum(self._lengths.pop(number)) for number in numbers)
        self.staleness += [self.ledger.staleness(number) for number in numbers]
        seconds = self._return_devices() + self.rates.update_s + tokens * self.rates.token_s / self.mode.trainers
        self.engines.share = 0.0 if self.mode.shares_devices else 1.0
        self._update = self.engines.now + seconds, numbers

    def _return_devices(self) -> float:
        """Take the trainer's devices back from the hybrid replicas; return the seconds that it takes."""
        if self.engines.replicas == self.mode.replicas:
            return 0.0
        self.engines.resize(self.mode.replicas)
        self.hybrid.note_switch(self.rates.switch_s)
        return self.rates.switch_s

    def _end_update(self) -> None:
        assert self._update is not None
        self.ledger.train(self._update[1])
        self._update = None
        self._is_due = self.ledger.trained % self.batch.prompts == 0

    def _end_sync(self) -> None:
        self.engines.share, self._synced_at, self._is_due = 1.0, math.inf, False
        self.hybrid.decide(self._waited_s)
        self._waited_s = 0.0
        if self.mode.hybrid and self.hybrid.in_use:
            self.engines.resize(self.mode.replicas + self.mode.hybrid)
        self._admit()

    def _admit(self) -> None:
        for number in self.ledger.admit(self.ledger.capacity):
            step, place = divmod(number, self.batch.prompts)
            if place == 0 or number not in self._lengths:
                self._lengths |= {step * self.batch.prompts + i: row for i, row in enumerate(self.batch.of_step(step))}
            lengths = self._lengths[number]
            self.engines.submit((number, sample, tokens) for sample, tokens in enumerate(lengths))


def simulate(
    mode: SimulatedMode, rates: SimulatedRates, batch: SimulatedBatch, steps: int = 8, warmup: int = 3
) -> SimulatedRun:
    """Simulate some steps of a mode.

    Args:
        mode: mode and devices.
        rates: speeds.
        batch: responses.
        steps: measured steps.
        warmup: steps before.
    """
    simulation = _Simulation(mode, rates, batch)
    simulation.run_until(warmup)
    engines = simulation.engines
    start, engine_busy, train_busy = engines.now, engines.busy_s, simulation.train_busy_s
    trained = len(simulation.staleness)
    simulation.run_until(warmup + steps)
    seconds = engines.now - start
    staleness = simulation.staleness[trained:]
    return SimulatedRun(
        mode=mode,
        step_s=seconds / steps,
        engine_idle=1 - (engines.busy_s - engine_busy) / seconds,
        trainer_idle=1 - (simulation.train_busy_s - train_busy) / seconds,
        mean_staleness=float(np.mean(staleness)),
        max_staleness=max(staleness),
    )


def best_split(
    mode: SimulatedMode,
    devices: int,
    replica_devices: int,
    rates: SimulatedRates,
    batch: SimulatedBatch,
    units: tuple[int, int] = (1, 1),
) -> SimulatedRun | None:
    """Simulate splits of the devices between engines and trainer, and return the fastest run.

    Args:
        mode: its numbers of replicas and trainer devices are not read.
        devices: devices of both.
        replica_devices: devices of a replica.
        rates: speeds.
        batch: responses.
        units: numbers that divide the devices of the engines and of the trainer.

    Returns:
        None if no split uses all devices.
    """
    unit = math.lcm(replica_devices, units[0])
    count = devices // unit
    shares = sorted({round(count * share) for share in np.arange(1, 16) / 16} & set(range(1, count)))
    splits = [(share * unit, devices - share * unit) for share in shares]
    modes = [
        replace(
            mode,
            replicas=engines // replica_devices,
            trainers=trainers,
            hybrid=trainers // replica_devices if mode.hybrid else 0,
        )
        for engines, trainers in splits
        if trainers % units[1] == 0
    ]
    return min((simulate(split, rates, batch) for split in modes), key=lambda run: run.step_s, default=None)


@dataclass(frozen=True)
class ModeComparison:
    """Simulated asynchronous training next to its alternatives.

    Attributes:
        replica_devices: devices of an engine replica.
        run: the configured mode.
        others: those that apply of ``synchronous`` (all devices generate, then train), ``fastest_split`` of the devices
            between engines and trainer, ``without_hybrid_rollout``, and ``min_replicas`` (the fewest elastic ones).
    """

    replica_devices: int
    run: SimulatedRun
    others: Mapping[str, SimulatedRun]


def compare_modes(
    mode: SimulatedMode,
    rates: SimulatedRates,
    batch: SimulatedBatch,
    replica_devices: int,
    units: tuple[int, int],
    min_replicas: int | None = None,
) -> ModeComparison:
    """Simulate an asynchronous mode, and its alternatives.

    Args:
        mode: the configured mode.
        rates: speeds.
        batch: responses.
        replica_devices: devices of an engine replica.
        units: see :func:`best_split`.
        min_replicas: least number of elastic replicas; None = they are not elastic.
    """
    devices = mode.trainers + (0 if mode.shares_devices else mode.replicas * replica_devices)
    others: dict[str, SimulatedRun] = {}
    if mode.hybrid:
        others["without_hybrid_rollout"] = simulate(replace(mode, hybrid=0), rates, batch)
    if min_replicas is not None:
        others["min_replicas"] = simulate(replace(mode, replicas=min_replicas), rates, batch)
    if not mode.shares_devices and (best := best_split(mode, devices, replica_devices, rates, batch, units)):
        others["fastest_split"] = best
    shared = SimulatedMode("sync", max(1, devices // replica_devices), devices, shares_devices=True)
    others["synchronous"] = simulate(shared, rates, batch)
    return ModeComparison(replica_devices, simulate(mode, rates, batch), others)
