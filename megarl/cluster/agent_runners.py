"""Agent runners as processes: conversations run outside the driver and survive the loss of a runner.

The runners send requests to the replicas' processes (:class:`ReplicaProcess`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ray

from megarl.agents.endpoint.server import make_token
from megarl.agents.types import ConversationGroup, SampleId, StoredTurn, Trajectory
from megarl.base.child_process import ChildEnvironment
from megarl.base.errors import StepImpossible, WorkerError
from megarl.cluster.agent_runner_worker import AgentRunnerWorker, RunnerReport
from megarl.cluster.calls import RankHandle, WorkerCall, WorkerFailed, WorkerSilent, first_ready, gather
from megarl.cluster.resources import PlacedPool
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.models.layout import ParallelLayout
from megarl.rewards.pool import RunCounts
from megarl.rewards.scorer import ScorerSpec
from megarl.rollout.interface import Completion, Request
from megarl.rollout.router import NoReplicaLeft, Replica, ReplicaLost, RouterStats
from megarl.tracing import TRACER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig

logger = logging.getLogger(__name__)

REPORT_S = 1.0
"""Heartbeat interval in seconds: a runner without finished samples reports its progress."""
MOST_LOST = 3
"""Maximum runner losses per generation or sync interval; more end the run."""
SHUTDOWN_S = 5.0
ROLE = "agents"


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


class RunnersLost(WorkerError, StepImpossible):
    """Too many agent runners were lost."""


@dataclass
class _Runner:
    """A runner process between opening and closing.

    Attributes:
        calls: calls whose success has not been checked.
    """

    handle: RankHandle
    client: str = field(default_factory=lambda: secrets.token_hex(8))
    running: set[SampleId] = field(default_factory=set)
    calls: list[WorkerCall] = field(default_factory=list)
    report: tuple[WorkerCall, float] | None = None
    progress: int = 0

    def call(self, name: str, *args: Any) -> None:
        """Start a verb, whose success is checked later."""
        self.calls.append(self.handle.submit(name, *args))

    def refs(self) -> list[ray.ObjectRef]:
        """References of all calls in progress."""
        return [call.ref for call in [*self.calls, *([self.report[0]] if self.report else [])]]


class AgentRunners:
    """Runner processes as one :class:`~megarl.agents.types.ConversationService`; a context manager.

    Each group goes to the runner with the fewest unfinished conversations. If a runner dies or stops responding, the
    others repeat its unfinished conversations; if it was the only one, it is replaced at once. A repeated conversation
    has the same seeds, so its sample is the same.

    The constructor does not wait for the processes; :meth:`wait_ready` does. Exiting the context closes the chat
    endpoint and ends the reward processes. The runners live until Ray's session ends, since the timeline fetches their
    last events.

    Args:
        pool: devices of the job, whose nodes the processes are on.
    """

    def __init__(
        self,
        config: GenerationJobConfig,
        tokenizer: PreTrainedTokenizerBase,
        pool: PlacedPool,
        scorers: Mapping[str, ScorerSpec] = MappingProxyType({}),
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._timeout_s, self._serves_endpoint = rollout.health.timeout_s, rollout.serves_endpoint
        self._ends = self._serves_endpoint or bool(scorers)
        kwargs = {
            "config": config,
            "tokenizer": tokenizer,
            "token": make_token() if self._serves_endpoint else "",
            "scorers": dict(scorers),
            "environment": ChildEnvironment.here(),
        }
        layout = ParallelLayout(dp=rollout.agent.num_workers)
        worker = f"{AgentRunnerWorker.__module__}:{AgentRunnerWorker.__name__}"
        self._group = WorkerGroup(ROLE, worker, kwargs, layout, pool, threads=2, on_device=False)
        self._runners: dict[int, _Runner] = {}
        self._replicas: Mapping[int, Replica] = {}
        self._groups: dict[int, ConversationGroup] = {}
        self._unfinished: Counter[int] = Counter()
        self._dead: list[int] = []
        self._losses = 0
        self._replaced_at = 0.0
        self._rewards = RunCounts()

    def __enter__(self) -> AgentRunners:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends:  # the endpoint's clients are answered, and its access file is deleted
            with contextlib.suppress(Exception):
                calls = [self._group.handle(rank).submit("end") for rank in range(self._group.world_size)]
                gather(calls, SHUTDOWN_S)

    def wait_ready(self) -> str:
        """Wait until the runners have started; return a line about the chat endpoint, empty without one.

        Raises:
            WorkerFailed: a runner did not start.
        """
        wait_ready([self._group])
        return str(self._group.call("describe")[0])

    def open(self, replicas: Mapping[int, Replica]) -> None:
        """Send the replicas to the runners; see :class:`~megarl.agents.types.ConversationService`."""
        self._replicas, self._groups, self._losses = replicas, {}, 0
        self._unfinished.clear()
        self._runners = {rank: self._open(rank) for rank in range(self._group.world_size)}

    def set_replicas(self, replicas: Mapping[int, Replica]) -> None:
        """Replace the replicas of all runners; see :class:`~megarl.agents.types.ConversationService`.

        A runner that has just been lost is left out; :meth:`finished` notices its loss.
        """
        self._replicas = replicas
        self._ask("set_replicas", replicas)
        self._replaced_at = time.monotonic()

    def submit(self, groups: Sequence[ConversationGroup]) -> None:
        """Distribute groups over the runners; see :class:`~megarl.agents.types.ConversationService`."""
        self._groups |= {group.number: group for group in groups}
        self._unfinished.update({group.number: len(group.ids) for group in groups})
        self._distribute(groups)

    def finished(self, wait_s: float) -> dict[SampleId, Trajectory]:
        """Collect finished samples of all runners; see :class:`~megarl.agents.types.ConversationService`.

        Raises:
            RunnersLost: more than :data:`MOST_LOST` runners were lost since :meth:`open` or :meth:`take_stats`.
        """
        deadline = time.monotonic() + wait_s
        samples: dict[SampleId, Trajectory] = {}
        while not samples:
            for runner in self._runners.values():
                runner.report = runner.report or (runner.handle.submit("finished", REPORT_S), time.monotonic())
            refs = [ref for runner in self._runners.values() for ref in runner.refs()]
            left = deadline - time.monotonic()
            ready = first_ready(refs, max(0.0, min(left, REPORT_S)))
            for rank, runner in list(self._runners.items()):
                try:
                    samples |= self._read_report(runner, ready, in_foreground=wait_s > 0)
                except (WorkerFailed, WorkerSilent) as failure:
                    if not _is_lost(failure):
                        raise
                    self._lose(rank, failure)
            if left <= 0:
                break
        return samples

    def abort(self, names: Sequence[SampleId]) -> None:
        """Abort conversations; see :class:`~megarl.agents.types.ConversationService`."""
        for runner in self._runners.values():
            chosen = [name for name in names if name in runner.running]
            self._end(runner, chosen)
            if chosen:
                runner.call("abort", chosen)

    def take_reward_counts(self) -> RunCounts:
        """Return the counts of all reports; see :class:`~megarl.agents.types.ConversationService`."""
        counts, self._rewards = self._rewards, RunCounts()
        return counts

    def take_stats(self) -> RouterStats:
        """Return statistics of all runners; see :class:`~megarl.agents.types.ConversationService`.

        Lost runners are replaced. A runner that has just been lost is left out; :meth:`finished` notices its loss.
        """
        stats = [answer for _, answer in self._ask("take_stats") if answer is not None]
        if self._dead:
            self._group.restart(self._dead)
            self._runners |= {lost: self._open(lost) for lost in self._dead}
        losses, self._losses, self._dead = self._losses, 0, []
        return RouterStats.merged(stats, losses)

    def stored_turns(self) -> dict[SampleId, Sequence[StoredTurn]]:
        """Collect the turns of all runners; see :class:`~megarl.agents.types.ConversationService`.

        The conversations of a runner that has just been lost have none: they are repeated.
        """
        turns: dict[SampleId, Sequence[StoredTurn]] = {}
        for runner, answer in self._ask("stored_turns"):
            turns |= dict.fromkeys(runner.running, ()) if answer is None else answer
        return turns

    def close(self) -> RouterStats:
        """Abort the remaining conversations; see :class:`~megarl.agents.types.ConversationService`.

        Lost runners are replaced.
        """
        stats = []
        for rank, runner in list(self._runners.items()):
            runner.running.clear()
            try:
                stats += gather([runner.handle.submit("close")], self._timeout_s)
            except (WorkerFailed, WorkerSilent) as failure:
                if not _is_lost(failure):
                    raise
                self._lose(rank, failure)
        if self._dead:
            self._group.restart(self._dead)
        self._runners, self._groups, self._dead = {}, {}, []
        return RouterStats.merged(stats, self._losses)

    def endpoint_metrics(self) -> dict[str, float]:
        """Return the metrics of external requests, which runner 0 serves; empty if it is lost."""
        if not self._serves_endpoint:
            return {}
        with contextlib.suppress(WorkerError):  # a lost runner is replaced by the next round
            metrics: dict[str, float] = gather([self._group.handle(0).submit("endpoint_metrics")], self._timeout_s)[0]
            return metrics
        return {}

    def _open(self, rank: int) -> _Runner:
        runner = _Runner(self._group.handle(rank))
        runner.call("open", self._replicas, runner.client)
        return runner

    def _ask(self, name: str, *args: Any) -> list[tuple[_Runner, Any]]:
        """Call a verb of all runners after their earlier calls; the answer of a runner that was lost is None."""
        calls = [(runner, runner.handle.submit(name, *args)) for runner in self._runners.values()]
        answers = []
        for runner, call in calls:
            try:
                answers.append((runner, gather([call], self._timeout_s)[0]))
            except (WorkerFailed, WorkerSilent) as failure:
                if not _is_lost(failure):
                    raise
                answers.append((runner, None))
        return answers

    def _distribute(self, groups: Iterable[ConversationGroup]) -> None:
        """Start conversations on the runners with the fewest unfinished ones."""
        parts: dict[int, list[ConversationGroup]] = {}
        load = Counter({rank: len(runner.running) for rank, runner in self._runners.items()})
        for group in groups:
            rank = min(self._runners, key=lambda rank: (load[rank], rank))
            load[rank] += len(group.ids)
            parts.setdefault(rank, []).append(group)
        for rank, part in parts.items():
            self._runners[rank].running.update(name for group in part for name in group.ids)
            self._runners[rank].call("start", part)

    def _read_report(
        self, runner: _Runner, ready: Sequence[ray.ObjectRef], *, in_foreground: bool
    ) -> dict[SampleId, Trajectory]:
        """Return the samples of a report that is ready.

        Turns and scores count as progress for the watchdog only if the caller waits for them: otherwise it watches
        other calls.

        Raises:
            WorkerFailed: a call failed, or the runner died.
            WorkerSilent: the runner does not answer.
            MegarlError: see :attr:`RunnerReport.failure`.
        """
        gather([call for call in runner.calls if call.ref in ready])
        runner.calls = [call for call in runner.calls if call.ref not in ready]
        assert runner.report is not None
        call, since = runner.report
        if call.ref not in ready:
            if time.monotonic() - since <= REPORT_S + self._timeout_s:
                return {}
            # After a long pause of the driver several reports are ready, and only the first of them is in `ready`.
            if not first_ready([call.ref], 0.0):
                raise WorkerSilent(f"no answer within {self._timeout_s:g} s", [(call.role, call.rank)])
        runner.report = None
        report: RunnerReport = gather([call])[0]
        for text in report.warnings:
            logger.warning("%s", text)
        self._rewards = self._rewards.plus(report.rewards)
        if report.progress != runner.progress:
            if in_foreground:
                TRACER.progress()
            runner.progress = report.progress
        has_others = isinstance(report.failure, NoReplicaLeft) and since < self._replaced_at
        if report.failure is not None and not has_others:
            raise report.failure
        samples = {name: ended for name, ended in report.samples.unpack().items() if name in runner.running}
        self._end(runner, list(samples))
        return samples

    def _end(self, runner: _Runner, names: Sequence[SampleId]) -> None:
        """Forget finished or aborted samples, and the groups without others."""
        runner.running.difference_update(names)
        for name in names:
            self._unfinished[name.group] -= 1
            if not self._unfinished[name.group]:
                del self._unfinished[name.group], self._groups[name.group]

    def _lose(self, rank: int, error: WorkerError) -> None:
        """Replace a lost runner: the other runners, or a new one, repeat its unfinished conversations.

        Raises:
            RunnersLost: too many runners were lost.
        """
        TRACER.progress()
        runner, self._losses = self._runners.pop(rank), self._losses + 1
        logger.warning("agent runner %d is lost, %d conversations are repeated: %s", rank, len(runner.running), error)
        self._dead.append(rank)
        self._group.kill(rank)
        with contextlib.suppress(WorkerError):  # the other runners notice a lost replica
            processes = [replica for replica in self._replicas.values() if isinstance(replica, ReplicaProcess)]
            gather([replica.forget(runner.client) for replica in processes], self._timeout_s)
        if self._losses > MOST_LOST:
            text = f"{self._losses} agent runners were lost in one step; the last: {error.text}"
            raise RunnersLost(text, code="agent.runners-lost") from error
        if not self._runners:
            self._group.restart(self._dead)
            self._runners = {lost: self._open(lost) for lost in self._dead}
            self._dead = []
        by_group = itertools.groupby(sorted(runner.running), lambda name: name.group)
        samples = {number: {name.sample for name in names} for number, names in by_group}
        self._distribute(replace(self._groups[number], samples=chosen) for number, chosen in samples.items())


def _is_lost(failure: WorkerFailed | WorkerSilent) -> bool:
    """Return whether a runner died or is silent; an exception of its verb ends the run instead."""
    return isinstance(failure, WorkerSilent) or failure.died
