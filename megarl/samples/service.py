"""The sample service: admits prompts, leads their conversations, scores them, and yields batches to train on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megarl.agents.trajectories import report_failures
from megarl.agents.types import ConversationGroup, SampleId, StoredTurn, Trajectory
from megarl.base.errors import StepImpossible
from megarl.base.image_tokens import Image
from megarl.base.reductions import Metrics
from megarl.base.signals import while_waiting
from megarl.config.schema.algorithm import SYNC
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto
from megarl.data.loader import PromptQueue
from megarl.rewards.manager import Failures
from megarl.rewards.outcome import Outcome
from megarl.samples.ledger import AdmissionRule, GroupLedger, check_staleness, staleness_metrics
from megarl.samples.replicas import Replicas
from megarl.samples.reward_phase import RewardPhase
from megarl.samples.rollouts import STORED, WAIT_S, Rollouts
from megarl.samples.selection import GroupSelection, ScoredGroups, parts_of

GROUPS, SAMPLES, TURNS, LEDGER = "groups", "samples", "turns", "ledger"
TimedPhase = Callable[[str], AbstractContextManager[object]]
"""Times a phase of the step under its name."""


def restored_ledger(
    config: TrainConfig, total_steps: int, step: int = 0, state: Mapping[str, Any] = MappingProxyType({})
) -> GroupLedger:
    """Build the ledger of a run: new, or resumed after ``step`` from :meth:`SampleService.state_dict`.

    Raises:
        CheckpointError, ConfigError: the work in flight does not fit the configuration.
    """
    batch, surplus = config.data.train_batch_size, 0
    if config.async_training.mode == SYNC and config.algorithm.filter_groups.enable:
        surplus = max(0, (config.data.gen_batch_size or batch) - batch)
    rule = AdmissionRule(batch, config.async_training.max_staleness, total_steps * batch, surplus)
    ledger = GroupLedger(rule, config.actor_rollout_ref.rollout.n + config.uses_baselines)
    if state:
        ledger.load_state_dict(state[LEDGER])
    else:
        ledger.start_at(step)
    return ledger


class SampleService:
    """The source of scored samples of every mode.

    Prompts are admitted up to the capacity of the ledger, and samples are scored as they end. A batch leaves as soon as
    its groups are complete. Synchronous training is the service with staleness 0: all groups of a batch are admitted
    when the step begins, and none is in flight after it. In disaggregated mode, engines with their own devices generate
    during training; in colocated mode they pause from the end of a batch until the next weights. A weight sync
    interrupts the responses in flight and continues them with the new weights (``partial_rollout``), or waits for their
    ends.

    With dynamic sampling, a group without variance gives its slot back, and the next prompt is admitted at once.

    With staleness 0 and one batch per sync, the samples, their order and their seeds are the same in all modes. Their
    tokens are, too, if all requests fit ``max_num_seqs``; otherwise timing decides which requests an engine computes
    together, in each mode.
    """

    def __init__(
        self,
        config: TrainConfig,
        ledger: GroupLedger,
        prompts: PromptQueue,
        rollouts: Rollouts,
        rewards: RewardPhase,
        replicas: Replicas,
    ) -> None:
        self.config, self.keys = config, config.async_training
        self.ledger, self.prompts = ledger, prompts
        self.rollouts, self.rewards, self.replicas = rollouts, rewards, replicas
        self.selection = GroupSelection(config)
        self._groups: dict[int, ConversationGroup] = {}
        self._ended: dict[SampleId, Trajectory] = {}
        self._scored: dict[int, ScoredGroups] = {}
        self._dropped: dict[int, ScoredGroups] = {}
        self._error: Exception | None = None
        self._unsent: list[int] = []

    @property
    def batch_size(self) -> int:
        """Groups of a batch: those of a step, or of a mini-batch in disaggregated mode."""
        return self.config.data.train_batch_size // self.keys.sync_interval

    def batches(self, step: int, phase: TimedPhase) -> Generator[tuple[DataProto, Metrics]]:
        """Yield the batches of a step as their groups are complete, each with its metrics of generation and scoring.

        Raises:
            StepImpossible: there is no batch to train on, for example because all rollout replicas are lost, or too
                few groups have varied scores.
            WeightSyncError: a sample has tokens of other weight versions than the mode allows.
        """
        self.rollouts.idle.start()
        for _ in range(self.keys.sync_interval):
            with phase("gen"):
                numbers = self._collect()
                metrics = self._staleness(numbers) | self.replicas.end_batch(self.rollouts)
                built = self._build(numbers)
            with phase("reward"):
                batch, finished = self._finish(numbers, built)
            with while_waiting(self._receive_meanwhile) if self.replicas.separate else nullcontext():
                yield batch, finished | metrics

    def sync_weights(self) -> Metrics:
        """Send the actor's weights to the engines, and admit prompts.

        Returns:
            Metrics of the sync; in asynchronous modes also of engines and trainer since the last one.
        """
        self._raise_error()
        waited = self._wait_validated()
        in_flight = self.keys.partial_rollout and self.ledger.running
        metrics = self.replicas.sync(self.rollouts, None if in_flight else self._wait_ended)
        self.ledger.sync()
        if self.replicas.across_steps:
            self._admit()
            metrics |= self.rollouts.runners.endpoint_metrics()
        return metrics | waited

    def _wait_validated(self) -> Metrics:
        """Wait for validation samples in flight, which are of the weights before the sync; return the seconds."""
        if not self.rollouts.validates:
            return {}
        started = time.perf_counter()
        with self.rollouts.idle.waiting():
            self.rollouts.wait_validated()
        return {"rollout_service/validation_wait_s": time.perf_counter() - started}

    def state_dict(self) -> dict[str, Any]:
        """Return the work in flight for a checkpoint; empty if the next group follows from the step.

        That is the ledger, the prompts of untrained groups, their finished samples, and the turns of the others.
        Without partial rollouts there are no turns, since their samples have one weight version.
        """
        if not self.replicas.across_steps and not self.ledger.untrained and not self.ledger.dropped:
            return {}
        try:
            self._receive(0.0)
            turns = self._stored_turns()
        except StepImpossible:  # the replicas are lost; this save is the last one
            turns = self._restored_turns()
        return {
            LEDGER: self.ledger.state_dict(),
            GROUPS: [{name: getattr(self._groups[n], name) for name in STORED} for n in self.ledger.untrained],
            SAMPLES: [[*name, _stored_trajectory(trajectory)] for name, trajectory in self._ended.items()],
            TURNS: [[*name, [dict(vars(turn)) for turn in of_sample]] for name, of_sample in turns.items()],
        }

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the work in flight; unfinished samples go on after their stored turns, with the same seeds.

        The ledger is restored before the workers start, see :func:`restored_ledger`.
        """
        self.replicas.weight_version = step  # weight versions go on, and those of finished samples stay valid
        if not state:
            return
        turns: dict[int, dict[int, list[StoredTurn]]] = defaultdict(dict)
        for number, sample, of_sample in state.get(TURNS, ()) if self.keys.partial_rollout else ():
            turns[number][sample] = [StoredTurn(**fields) for fields in of_sample]
        self._groups = {
            group["number"]: self.rollouts.restored_group(group, turns[group["number"]]) for group in state[GROUPS]
        }
        self._ended = {
            SampleId(group, sample): _restored_trajectory(fields) for group, sample, fields in state[SAMPLES]
        }
        self._unsent = self.ledger.running

    def close(self) -> None:
        """Abandon the work in flight."""
        self.rollouts.close()

    def _collect(self) -> list[int]:
        """Wait until the groups of a batch are complete; return their numbers in the order of admission."""
        self.replicas.ready()
        self._admit()
        with self.rollouts.idle.waiting():
            while (numbers := self._next_groups()) is None:
                self._receive(WAIT_S)
                self._drop_groups()
                self._admit()
        return numbers

    def _next_groups(self) -> list[int] | None:
        """Return the groups of the next batch; None while too few are complete."""
        if self._undecided():
            return None
        numbers = self.ledger.next_batch(self.batch_size)
        if numbers is None and not self.ledger.running and not self._admissible:
            finished = self.ledger.finished
            fill = self.selection.fill(self.batch_size - len(finished), list(self._dropped))
            self._scored |= {number: self._dropped[number] for number in fill}
            numbers = sorted([*finished, *fill])
        return numbers

    def _staleness(self, numbers: Sequence[int]) -> Metrics:
        """Check the weight versions of a batch, and return its metrics of staleness; empty in synchronous training.

        Raises:
            WeightSyncError: a token is newer than the weights of the batch, or staler than the bound.
        """
        version, admitted = self.ledger.version, self._varied(numbers)
        trajectories = self._trajectories(admitted)
        check_staleness(trajectories, version + 1, self.ledger.rule.bound)
        if not self.rollouts.with_versions:
            return {}
        staleness = [self.ledger.staleness(number) for number in admitted]
        return staleness_metrics(trajectories, version + 1, staleness) | {
            "rollout_service/finished": float(len(self.ledger.finished) - len(admitted)),
            "rollout_service/running": float(len(self.ledger.running)),
        }

    def _build(self, numbers: Sequence[int]) -> tuple[DataProto, Metrics] | None:
        """Build the batch of groups that are scored together; None with dynamic sampling, which has scored each."""
        trajectories = self._trajectories(self._varied(numbers))
        report_failures(trajectories)
        if self.selection.filter.enable:
            return None
        return self.rollouts.batch_of([self._groups[number] for number in numbers], trajectories)

    def _finish(self, numbers: Sequence[int], built: tuple[DataProto, Metrics] | None) -> tuple[DataProto, Metrics]:
        """Score a batch if dynamic sampling has not, count its groups as trained, and select the rows to train on."""
        if built is not None:
            batch, metrics = built
            scored = self.selection.groups(numbers, self.rewards.score(batch, check=False), metrics)
            self._scored |= dict.fromkeys(numbers, scored)
        beyond = [number for number in self._dropped if self.ledger.rule.surplus and number > numbers[-1]]
        dropped = {number: part for number, part in self._dropped.items() if number not in beyond}
        parts = parts_of(self._scored, numbers, dropped)
        self.rewards.check([part.failures for part in parts])
        admitted = self._varied(numbers)
        self.ledger.train(admitted)
        self.ledger.reinstate(len(numbers) - len(admitted))
        surplus = self._restart_surplus(beyond)
        batch, metrics = self.selection.batch(self._scored, numbers, self._dropped, surplus)
        self._forget({*numbers, *self._dropped})
        self._dropped = {}
        reported = set(map(id, parts))
        for number, part in self._scored.items():  # metrics of groups that were scored together count once
            if id(part) in reported:
                self._scored[number] = part._replace(metrics={}, tokens=0, failures=Failures())
        return batch, metrics

    def _restart_surplus(self, dropped: Sequence[int]) -> int:
        """Let the groups beyond the batch start again with the next weights; return their number.

        Args:
            dropped: dropped groups; how many have ended depends on time.
        """
        if not self.ledger.rule.surplus:
            return 0
        self._unsent = self.ledger.restart(dropped)
        for number in dropped:
            del self._dropped[number]
        for number in self._unsent:
            self._scored.pop(number, None)
            self._forget_samples(number)
        return len(self._unsent)

    def _undecided(self) -> list[int]:
        """Return the finished groups that dynamic sampling has not scored."""
        if not self.selection.filter.enable:
            return []
        return sorted(number for number in self.ledger.finished if number not in self._scored)

    def _drop_groups(self) -> None:
        """Score finished groups, and drop those without variance (dynamic sampling).

        Reward functions score each group on its own, so that results do not depend on time. A reward model scores
        those that are finished together; on the engines' devices, when no conversation is in flight.
        """
        undecided = self._undecided()
        if self.rewards.model is None:
            for number in undecided:
                self._score([number])
        elif undecided and (self.replicas.separate or not self.ledger.running):
            if not self.replicas.across_steps:
                self.replicas.free()
            self._score(undecided)
            self.replicas.ready()

    def _score(self, numbers: Sequence[int]) -> None:
        batch, metrics = self.rollouts.batch_of(
            [self._groups[number] for number in numbers], self._trajectories(numbers)
        )
        part = self.selection.groups(numbers, self.rewards.score(batch, check=False), metrics)
        for number in numbers:
            if number in part.varied:
                self._scored[number] = part
            else:
                self._dropped[number] = part
                self.ledger.drop(number)
                self._forget_samples(number)

    def _varied(self, numbers: Sequence[int]) -> list[int]:
        """Return the groups of a batch without the dropped ones that fill it."""
        return [number for number in numbers if number not in self._dropped]

    def _trajectories(self, numbers: Sequence[int]) -> list[Trajectory]:
        return [self._ended[name] for number in numbers for name in self._groups[number].ids]

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._scored.pop(number, None)
            self._forget_samples(number)
            del self._groups[number]

    def _forget_samples(self, number: int) -> None:
        for name in self._groups[number].ids:
            self._ended.pop(name, None)

    @property
    def _admissible(self) -> int:
        """Number of prompts to admit now: the ledger's capacity without slots that dynamic sampling may not refill."""
        return max(0, int(self.ledger.capacity - max(0, len(self._dropped) - self.selection.max_dropped)))

    def _admit(self) -> None:
        """Admit prompts, and start them with the unsent samples of a resumed run."""
        count = self._admissible
        if count:
            prompts = self.prompts.take(count)
            numbers = self.ledger.admit(count)
            self._groups |= {group.number: group for group in self.rollouts.training_groups(prompts, numbers)}
            self._unsent += numbers
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self.rollouts.submit([self._missing(number) for number in unsent])

    def _missing(self, number: int) -> ConversationGroup:
        return replace(self._groups[number], samples=self.ledger.missing(number))

    def _receive(self, wait_s: float) -> None:
        """Record the samples that have ended."""
        self._raise_error()
        ended = self.rollouts.finished(wait_s)
        self._ended |= ended
        for name in ended:
            self.ledger.end_sample(*name)

    def _receive_meanwhile(self) -> None:
        """Record the samples that have ended while the trainer trains, and refill the slots of dropped groups.

        The next :meth:`_receive` raises an error.
        """
        if self._error is None:
            try:
                self._receive(0.0)
                if self.selection.filter.enable and self.rewards.model is None:
                    self._drop_groups()
                    self._admit()
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        """Raise an error of :meth:`_receive_meanwhile`, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_ended(self) -> None:
        """Wait until no conversation is in flight."""
        with self.rollouts.idle.waiting():
            while self.ledger.running:
                self._receive(WAIT_S)

    def _stored_turns(self) -> dict[SampleId, Sequence[StoredTurn]]:
        """Interrupt the conversations in flight for a moment; return the turns of the unfinished samples."""
        if not self.keys.partial_rollout:
            return {}
        if not self.rollouts.is_open:
            return self._restored_turns()
        turns = self.rollouts.runners.stored_turns()
        while any(name not in turns for name in self._unfinished()):  # they have ended
            self._receive(WAIT_S)
        return {name: turns[name] for name in self._unfinished() if turns[name]}

    def _restored_turns(self) -> dict[SampleId, Sequence[StoredTurn]]:
        """Return the turns that unfinished samples have from an earlier checkpoint."""
        stored = {name: self._groups[name.group].turns.get(name.sample, ()) for name in self._unfinished()}
        return {name: turns for name, turns in stored.items() if turns}

    def _unfinished(self) -> Iterator[SampleId]:
        for number in self.ledger.running:
            yield from self._missing(number).ids


def _stored_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    fields = {
        name: list(value) if isinstance(value, range | tuple) else value for name, value in vars(trajectory).items()
    }
    return fields | {"images": [(image.data, image.rows, image.columns, image.key) for image in trajectory.images]}


def _restored_trajectory(stored: Mapping[str, Any]) -> Trajectory:
    outcome, images = stored.get("outcome"), stored.get("images", ())
    score = None if outcome is None else Outcome(*outcome)
    return Trajectory(**{**stored, "outcome": score, "images": [Image(*image) for image in images]})
