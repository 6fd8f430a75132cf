"""The rollout service: admits prompts, generates across steps, and yields batches as their groups are complete."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from megarl.agents.turns import version_spans
from megarl.agents.types import TRAINING_REWARD, ConversationGroup, PlannedSample, SampleId, StoredTurn, Trajectory
from megarl.base.errors import StepImpossible, WeightSyncError
from megarl.base.signals import while_waiting
from megarl.config.schema.async_training import COLOCATED
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto
from megarl.data.loader import PromptQueue
from megarl.rewards.outcome import Outcome
from megarl.rollout.interface import NO_VERSION
from megarl.rollout.router_stats import RouterStats
from megarl.rollout.serving import HeldRequests
from megarl.trainer.metrics.step_metrics import Metrics
from megarl.trainer.phases.dynamic_sampling import SampleCollector
from megarl.trainer.phases.reward_phase import RewardPhase
from megarl.trainer.phases.rollout_phase import RolloutPhase
from megarl.trainer.phases.rollout_traffic import WAIT_S
from megarl.trainer.roles.job_roles import Roles
from megarl.trainer.rollout_service.idle_clock import IdleClock
from megarl.trainer.rollout_service.ledger import AdmissionRule, GroupLedger
from megarl.trainer.rollout_service.source import TimedPhase
from megarl.trainer.rollout_service.staleness import staleness_metrics
from megarl.trainer.state.replay_order import OrderedBatch, OrderFile, ReplayOrder
from megarl.trainer.state.run_state import Resume

logger = logging.getLogger(__name__)

GROUPS, SAMPLES, TURNS, LEDGER = "groups", "samples", "turns", "ledger"
POLL_S = 0.05
"""Polling interval in seconds until all conversations of a replay wait for weights."""


def restored_ledger(config: TrainConfig, total_steps: int, resume: Resume | None) -> GroupLedger:
    """Build the ledger of an asynchronous run, at the state of the checkpoint to resume from.

    Raises:
        CheckpointError, ConfigError: the work in flight does not fit the configuration.
    """
    batch = config.data.train_batch_size
    rule = AdmissionRule(batch, config.async_training.max_staleness, total_steps * batch)
    ledger = GroupLedger(rule, config.actor_rollout_ref.rollout.n)
    if resume is not None and resume.state.rollout:
        ledger.load_state_dict(resume.state.rollout[LEDGER])
    elif resume is not None:
        ledger.start_at(resume.state.step)
    return ledger


class RolloutService:
    """Generates under the admission rule: on separate devices during training, or on shared ones between updates.

    Prompts are admitted after each weight sync, up to the capacity of the ledger. Samples are scored as they end, also
    while the trainer trains. A batch leaves as soon as its groups are complete. The next sync interrupts the responses
    in flight and continues them with the new weights (``partial_rollout``), or waits for their ends. In colocated mode
    they pause from the end of the batch on. With staleness 0 and one batch per sync, none is in flight: the samples,
    their order and their seeds are those of synchronous training. Their tokens are, too, if all requests fit
    ``max_num_seqs``; otherwise timing decides which requests an engine computes together, in each mode.

    Args:
        config: complete.
        ledger: of the run, at the state of the checkpoint to resume from, if any.
        prompts: queue of training prompts.
        rollout: builds conversations and batches.
        rewards: scores batches.
        roles: worker groups.
        order: records the groups of each batch.
        replay: groups of each batch of an earlier run; None = by completion.
    """

    def __init__(
        self,
        config: TrainConfig,
        ledger: GroupLedger,
        prompts: PromptQueue,
        rollout: RolloutPhase,
        rewards: RewardPhase,
        roles: Roles,
        order: OrderFile,
        replay: ReplayOrder | None = None,
    ) -> None:
        self.config, self.keys = config, config.async_training
        self.ledger, self.prompts = ledger, prompts
        self.rollout, self.rewards, self.roles = rollout, rewards, roles
        self.traffic = rollout.traffic
        self.order, self.replay = order, replay
        self.collector = SampleCollector(config)
        self._groups: dict[int, ConversationGroup] = {}
        self._ended: dict[SampleId, Trajectory] = {}
        self._idle = IdleClock()
        self._switch_s = 0.0
        self._error: Exception | None = None
        self._unsent: list[int] = []

    @property
    def batch_size(self) -> int:
        """Groups of a batch: those of a step, or of a mini-batch in disaggregated mode."""
        return self.config.data.train_batch_size // self.keys.sync_interval

    @property
    def _is_colocated(self) -> bool:
        return self.keys.mode == COLOCATED

    def batches(self, step: int, phase: TimedPhase) -> Generator[tuple[DataProto, Metrics]]:
        """Yield the batches of a step; see :meth:`SampleSource.batches`."""
        self._idle.start()
        holds = self.config.holds_proximal_policy
        for number in range(self.keys.sync_interval):
            with phase("gen"):
                batch, metrics = self._collect()
                if not self._is_colocated:
                    self._switch_s += self.roles.return_devices(self.traffic.update_replicas)
                if self._is_colocated:
                    self._await_recorded_versions()
                    self.roles.pause_engines()
            if holds and number == 0:
                with phase("old_log_prob"):
                    self.roles.actor.hold_weights()
            with phase("reward"):
                scored = self.rewards.score(batch)
                self.collector.add(scored.batch, metrics | scored.metrics)
                finished: Metrics = {}
                batch = self.collector.finish(finished)
            with nullcontext() if self._is_colocated else while_waiting(self._receive_meanwhile):
                yield batch, finished
        if holds:
            self.roles.actor.release_weights()

    def sync_weights(self) -> Metrics:
        """Send the actor's weights to the engines, and admit prompts.

        Returns:
            Metrics of the sync, and of engines and trainer since the last one.
        """
        self._raise_error()
        self._await_recorded_versions()
        self.roles.update_replicas(self.traffic.update_replicas, self._idle.waited_s)
        in_flight = self.keys.partial_rollout and self.ledger.running
        metrics = self._sync_in_flight() if in_flight or self._is_colocated else self._sync_when_idle()
        metrics["rollout_service/replicas"] = float(len(self.roles.replicas()))
        if not self._is_colocated:
            metrics["rollout_service/switch_s"], self._switch_s = self._switch_s, 0.0
            metrics |= self._idle.metrics(metrics.get("rollout/replica_utilization/mean", 0.0))
        self._admit()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger, the prompts of untrained groups, their finished samples, and the turns of the others.

        Without partial rollouts there are no turns, since their samples have one weight version.
        """
        try:
            self._receive(0.0)
            turns = self._stored_turns()
        except StepImpossible:  # the replicas are lost; this save is the last one
            turns = self._restored_turns()
        return {
            LEDGER: self.ledger.state_dict(),
            GROUPS: [_stored_group(self._groups[number]) for number in self.ledger.untrained],
            SAMPLES: [[*name, _stored_trajectory(trajectory)] for name, trajectory in self._ended.items()],
            TURNS: [[*name, [dict(vars(turn)) for turn in of_sample]] for name, of_sample in turns.items()],
        }

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the work in flight; unfinished samples go on after their stored turns, with the same seeds.

        The ledger is restored before the workers start, see :func:`restored_ledger`.
        """
        self.roles.sharding_manager.version = step  # weight versions go on, and those of finished samples stay valid
        if not state:
            return
        turns = {
            SampleId(group, sample): [StoredTurn(**fields) for fields in of_sample]
            for group, sample, of_sample in (state.get(TURNS, ()) if self.keys.partial_rollout else ())
        }
        self._groups = {group["number"]: self._restored_group(group, turns) for group in state[GROUPS]}
        self._ended = {
            SampleId(group, sample): _restored_trajectory(fields) for group, sample, fields in state[SAMPLES]
        }
        self._unsent = self.ledger.running

    def close(self) -> None:
        """Abandon the work in flight."""
        if self.traffic.is_open:
            self.traffic.close()

    def _collect(self) -> tuple[DataProto, Metrics]:
        """Wait until the groups of a batch are complete; return their samples in the order of admission."""
        self._admit()
        with self._idle.waiting():
            while (numbers := self._next_groups()) is None:
                self._receive(WAIT_S)
        batch_number = self.ledger.trained // self.batch_size
        version, staleness = self.ledger.version, [self.ledger.staleness(number) for number in numbers]
        groups = [self._groups[number] for number in numbers]
        names = [name for group in groups for name in group.ids]
        trajectories = [self._ended[name] for name in names]
        batch, metrics = self.rollout.batch_of(groups, trajectories)
        check_staleness(trajectories, version + 1, self.ledger.rule.bound)
        metrics |= staleness_metrics(trajectories, version + 1, staleness)
        metrics["rollout_service/finished"] = float(len(self.ledger.finished) - len(numbers))
        metrics["rollout_service/running"] = float(len(self.ledger.running))
        self.ledger.train(numbers)
        self._record_order(batch_number, numbers, names, trajectories)
        for number in numbers:
            del self._groups[number]
        for name in names:
            del self._ended[name]
        return batch, metrics

    def _next_groups(self) -> list[int] | None:
        if self.replay is None:
            return self.ledger.next_batch(self.batch_size)
        groups = self.replay.groups(self.ledger.trained // self.batch_size)
        return self.ledger.replayed_batch(groups)

    def _admit(self) -> None:
        """Admit prompts up to the capacity, and start them with the unsent samples of a resumed run."""
        count = self.ledger.capacity
        if count:
            prompts = self.prompts.take(count)
            numbers = self.ledger.admit(count)
            groups = self.rollout.training_groups(prompts, [self._origin(number) for number in numbers], numbers)
            self._groups |= {group.number: self._with_spans(group) for group in groups}
            self._unsent += numbers
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self.traffic.submit([self._missing(number) for number in unsent])
        if self._awaits_versions and self.traffic.is_open:
            self.traffic.runners.set_version(self.roles.sharding_manager.version)

    def _origin(self, number: int) -> tuple[int, int]:
        """Return step and batch index of the group in synchronous training, which seed its samples."""
        step, place = divmod(number, self.config.data.train_batch_size)
        return step + 1, place

    def _missing(self, number: int) -> ConversationGroup:
        missing = {SampleId(number, sample) for sample in self.ledger.missing(number)}
        return self._groups[number].only(missing)

    def _receive(self, wait_s: float) -> None:
        """Record the samples that have ended."""
        self._raise_error()
        if not self.traffic.is_open:
            return
        for name, trajectory in self.traffic.finished(wait_s):
            self._ended[name] = trajectory
            self.ledger.end_sample(*name)

    def _receive_meanwhile(self) -> None:
        """Record the samples that have ended while the trainer trains; the next :meth:`_receive` raises an error."""
        if self._error is None:
            try:
                self._receive(0.0)
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        """Raise an error of :meth:`_receive_meanwhile`, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _sync_when_idle(self) -> Metrics:
        """Wait until no conversation is in flight, and replace the weights."""
        started = time.perf_counter()
        stats = RouterStats()
        with self._idle.waiting():
            while self.ledger.running:
                self._receive(WAIT_S)
        if self.traffic.is_open:
            stats = self.traffic.close()
            if stats.to_replace:
                self.rollout.on_lost(stats.to_replace)
        waited = {"rollout_service/sync_wait_s": time.perf_counter() - started}
        return waited | _held_metrics([]) | stats.metrics() | self.roles.sync_weights()

    def _sync_in_flight(self) -> Metrics:
        """Replace the weights between two tokens of the responses in flight; new replicas get their share of them."""
        metrics, held = self.roles.sync_weights_in_flight()
        stats = self.traffic.take_stats()
        self.traffic.update_replicas()
        return {"rollout_service/sync_wait_s": 0.0} | _held_metrics(held) | stats.metrics() | metrics

    @property
    def _awaits_versions(self) -> bool:
        """Whether the conversations repeat the weight versions of an earlier run."""
        return self.replay is not None and self.keys.partial_rollout

    def _await_recorded_versions(self) -> None:
        """Wait until all conversations have the tokens that this weight version generated in the earlier run."""
        while self._awaits_versions and self.traffic.is_open and not self.traffic.runners.waits_for_weights():
            self._receive(POLL_S)

    def _stored_turns(self) -> dict[SampleId, Sequence[StoredTurn]]:
        """Interrupt the conversations in flight for a moment; return the turns of the unfinished samples."""
        if not self.keys.partial_rollout:
            return {}
        if not self.traffic.is_open:
            return self._restored_turns()
        turns = self.traffic.runners.stored_turns()
        while any(name not in turns for name, _ in self._unfinished()):  # they have ended
            self._receive(WAIT_S)
        return {name: turns[name] for name, _ in self._unfinished() if turns[name]}

    def _restored_turns(self) -> dict[SampleId, Sequence[StoredTurn]]:
        """Return the turns that unfinished samples have from an earlier checkpoint."""
        return {name: sample.turns for name, sample in self._unfinished() if sample.turns}

    def _unfinished(self) -> Iterator[tuple[SampleId, PlannedSample]]:
        for number in self.ledger.running:
            group = self._missing(number)
            yield from zip(group.ids, group.samples, strict=True)

    def _record_order(
        self, batch: int, numbers: Sequence[int], names: Sequence[SampleId], trajectories: Sequence[Trajectory]
    ) -> None:
        """Record a batch for replays; warn if samples of a replayed batch differ from the recorded ones."""
        versions = None
        if self.keys.partial_rollout:
            spans = {name: version_spans(trajectory) for name, trajectory in zip(names, trajectories, strict=True)}
            versions = [[spans[name] for name in self._groups[number].ids] for number in numbers]
            if self.replay is not None and (other := [n for n in names if spans[n] != self.replay.spans(n)]):
                logger.warning(
                    "trainer.replay_order: %d of %d samples of batch %d have other tokens per weight version than in "
                    "the recorded run, the first is sample %d of group %d",
                    *(len(other), len(names), batch, other[0].sample, other[0].group),
                )
        self.order.add(batch, OrderedBatch(list(numbers), versions))

    def _with_spans(self, group: ConversationGroup) -> ConversationGroup:
        """Add the weight versions of the recorded run that this run replays, if any."""
        replay = self.replay
        if replay is None:
            return group
        names = zip(group.ids, group.samples, strict=True)
        return replace(group, samples=[replace(sample, spans=replay.spans(name)) for name, sample in names])

    def _restored_group(
        self, stored: Mapping[str, Any], turns: Mapping[SampleId, Sequence[StoredTurn]]
    ) -> ConversationGroup:
        params = self.rollout.training_params()
        samples = [
            PlannedSample(sample, params, seed, turns.get(SampleId(stored["number"], sample), ()))
            for sample, seed in enumerate(stored["seeds"])
        ]
        group = ConversationGroup(
            samples=samples,
            messages=stored["facts"].get("raw_prompt", ()),
            with_routes=self.rollout.with_routes,
            with_turns=self.rollout.with_turns,
            reward=TRAINING_REWARD,
            **{name: stored[name] for name in STORED},
        )
        return self._with_spans(group)


def _held_metrics(held: Sequence[HeldRequests]) -> Metrics:
    return {
        "rollout_service/interrupted": float(sum(one.requests for one in held)),
        "rollout_service/recomputed_tokens": float(sum(one.tokens for one in held)),
    }


STORED = ("number", "prompt_ids", "key", "agent_name", "facts")
"""Fields of a group that a checkpoint has; the others follow from them."""


def _stored_group(group: ConversationGroup) -> dict[str, Any]:
    return {name: getattr(group, name) for name in STORED} | {"seeds": [sample.seed for sample in group.samples]}


def _stored_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, range | tuple) else value for name, value in vars(trajectory).items()
    }


def _restored_trajectory(stored: Mapping[str, Any]) -> Trajectory:
    outcome = stored.get("outcome")
    return Trajectory(**{**stored, "outcome": None if outcome is None else Outcome(*outcome)})


def check_staleness(trajectories: Sequence[Trajectory], version: int, bound: int) -> None:
    """Check the weight versions of all tokens against the bound.

    Args:
        trajectories: of a batch.
        version: weight version that trains them.
        bound: largest staleness.

    Raises:
        WeightSyncError: a token is newer than ``version``, or staler than the bound.
    """
    for trajectory in trajectories:
        versions = trajectory.weight_versions if len(trajectory.weight_versions) else [trajectory.weight_version]
        sampled_by = [int(number) for number in versions if number != NO_VERSION]
        if sampled_by and not version - bound <= min(sampled_by) <= max(sampled_by) <= version:
            raise WeightSyncError(
                f"a sample was generated by the weight versions {min(sampled_by)} to {max(sampled_by)}; version "
                f"{version} trains samples of {version - bound} or later (async_training.max_staleness={bound}). "
                "Resume the run from its last checkpoint",
                code="sync.stale-sample",
            )
