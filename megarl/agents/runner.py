"""The agent runner: leads conversations concurrently in one event loop, scores the samples, and hands them out.

A failed conversation ends alone: it is counted, and none of its tokens is trained on. The runner is a plain class,
usable from a test or a script. A training job starts it in processes (:mod:`megarl.cluster.agent_runners`).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.agents.build import build_agent_loops, conversation_limits
from megarl.agents.endpoint.endpoint import EndpointAddress, build_endpoint
from megarl.agents.event_loop import EventLoopThread, monitored_loop
from megarl.agents.loop import AgentLoop
from megarl.agents.trajectories import LED_AGAIN
from megarl.agents.turns import GenerateWithRoutes, RouteRecord, TurnRecord, context_digest
from megarl.agents.types import (
    AgentError,
    Conversation,
    ConversationGroup,
    Generate,
    SampleId,
    StoredTurn,
    Trajectory,
)
from megarl.base.child_process import ChildEnvironment
from megarl.base.errors import RewardError, WeightSyncError, WorkerError
from megarl.base.image_tokens import Image, image_spans
from megarl.data.images import IMAGES, ImageReader
from megarl.rewards.outcome import Outcome
from megarl.rewards.pool import RunCounts
from megarl.rewards.scorer import Scorer, ScorerSpec, TaskBuilder
from megarl.rollout.image_reader import image_reader
from megarl.rollout.interface import RequestRefused, RolloutError, no_support
from megarl.rollout.router import Replica, Router, RouterStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig

FATAL = (RolloutError, WorkerError, WeightSyncError)
"""Errors that end all conversations, such as the loss of all engines; any other error ends one conversation.

:class:`RequestRefused` is one of the others.
"""
REST_S = 0.05
"""Seconds between two reports of samples. The first sample is reported at once, but many end together."""


class SampleScorer:
    """Scores single samples in a pool of reward processes, which start at once.

    Args:
        spec: reward functions and number of processes; none of the functions takes batches.
        runner: number of the agent runner, for the names of log files.
        environment: of the driver; None = as this process.
    """

    def __init__(
        self,
        spec: ScorerSpec,
        tokenizer: PreTrainedTokenizerBase,
        runner: int = 0,
        environment: ChildEnvironment | None = None,
    ) -> None:
        self._pool = spec.pool(runner, environment)
        self._scorer = Scorer(spec.terms, self._pool)
        self._tasks = TaskBuilder(tokenizer, self._scorer.wants_prompt)
        stream = self._pool.stream()
        assert stream is not None, "a function takes batches"
        self._stream = stream

    async def score(self, columns: Mapping[str, Any], trajectory: Trajectory) -> Outcome | None:
        """Score a sample.

        Returns:
            The outcome. None for a failed conversation or an empty response, and for a row that cannot be scored: the
            reward manager reports these.

        Raises:
            RewardError: no process for functions can be started.
        """
        if trajectory.error is not None or not len(trajectory.response_ids):
            return None
        try:
            facts = {**columns, **trajectory.fields}
            task = self._tasks.build("", facts, trajectory.prompt_ids, trajectory.response_ids)
            jobs = self._scorer.jobs(task)
        except (RewardError, KeyError):
            return None
        futures = [asyncio.wrap_future(future) for future in self._stream.submit(jobs)]
        return self._scorer.outcome_of(await asyncio.gather(*futures))

    def take_counts(self) -> RunCounts:
        """Return retries and replaced processes since the last call."""
        return self._stream.take_counts()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class AgentRunner:
    """Leads conversations; see :class:`~megarl.agents.types.ConversationService`. All methods are thread-safe.

    Args:
        rank: number of this runner; runner 0 serves the configured address of the chat endpoint.
        runners: number of runners, which share the slots of the engines and ``agent.max_concurrency``.
        token: bearer token of the chat endpoint; empty = of the environment, or a random one.
        scorers: reward functions by name, see :attr:`ConversationGroup.reward`.
        environment: of the driver, for reward functions; None = as this process.

    Attributes:
        endpoint: chat endpoint of the policy; None = the run serves none.

    Raises:
        ConfigError: the endpoint cannot listen at its address.
    """

    def __init__(
        self,
        config: GenerationJobConfig,
        tokenizer: PreTrainedTokenizerBase,
        rank: int = 0,
        runners: int = 1,
        token: str = "",
        scorers: Mapping[str, ScorerSpec] = MappingProxyType({}),
        environment: ChildEnvironment | None = None,
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._config, self._tokenizer = config, tokenizer
        self._limits = conversation_limits(config)
        self._capacity = -(-request_capacity(rollout.max_num_seqs) // runners)
        self._timeout_s = rollout.health.timeout_s
        self._loops: dict[str, AgentLoop] = {}
        self._slots = asyncio.Semaphore(-(-rollout.agent.max_concurrency // runners))
        self._changed = threading.Condition()
        self._ended: dict[SampleId, Trajectory] = {}
        self._failure: Exception | None = None
        self._tasks: dict[SampleId, asyncio.Task[Trajectory]] = {}
        self._records: dict[SampleId, TurnRecord] = {}
        self._pending = self._epoch = 0
        self._reported_at = 0.0
        self._scope, self._resources = AsyncExitStack(), ExitStack()
        self._router: Router | None = None
        self._loop = EventLoopThread("conversations")
        self._resources.callback(self._loop.close)
        address = None if rank == 0 else EndpointAddress(rollout.endpoint.host)
        self.endpoint = build_endpoint(config, tokenizer, self._loop, token, address)
        if self.endpoint is not None:
            self._resources.enter_context(self.endpoint)
        specs = {id(spec): spec for spec in scorers.values()}  # several names may share one
        pools = {key: SampleScorer(spec, tokenizer, rank, environment) for key, spec in specs.items()}
        self._scorers = {name: pools[id(spec)] for name, spec in scorers.items()}
        for scorer in pools.values():
            self._resources.callback(scorer.close)
        self._scored = 0

    @property
    def progress(self) -> int:
        """Number of turns that have been generated since :meth:`open`, and of scored samples."""
        return self._scored + (0 if self._router is None else self._router.finished)

    def open(self, replicas: Mapping[int, Replica], client: str = "") -> None:
        """Serve conversations with these rollout replicas from now on.

        Args:
            client: name of the runner at the replicas; empty = a random one.
        """
        self._reset()
        self._loop.run(self._open(replicas, client))

    def set_replicas(self, replicas: Mapping[int, Replica]) -> None:
        """Replace the replicas; see :class:`~megarl.agents.types.ConversationService`."""

        async def replace() -> None:
            if self._router is not None:
                await self._router.set_replicas(replicas)

        self._loop.run(replace())

    def submit(self, groups: Sequence[ConversationGroup]) -> None:
        """Start conversations, in this order, without waiting for them."""
        with self._changed:
            self._pending += sum(len(group.ids) for group in groups)
        try:
            missing = sorted({group.agent_name for group in groups} - self._loops.keys())
            self._loops |= build_agent_loops(self._config, self._tokenizer, missing, self.endpoint)
        except Exception as error:
            self._fail(error)
            return
        self._loop.loop.call_soon_threadsafe(self._start, groups)

    def finished(self, wait_s: float) -> dict[SampleId, Trajectory]:
        """Return trajectories that have ended since the last call; wait for the first one, at most ``wait_s`` seconds.

        Raises:
            MegarlError: no conversation can go on; the first error of :data:`FATAL`, of building an agent loop, or of
                starting reward processes. After the loss of all replicas they can go on with others, and no sample is
                dropped.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            epoch = self._epoch
            self._changed.wait_for(lambda: bool(self._ended) or self._is_over(epoch), wait_s)
            rest = min(self._reported_at + REST_S, deadline) - time.monotonic()
            self._changed.wait_for(lambda: not self._pending or self._is_over(epoch), max(0.0, rest))
            if self._epoch != epoch:
                return {}
            lost = self._router.no_replica if self._router is not None else None
            if (failure := self._failure or lost) is not None:
                raise failure
            ended, self._ended = self._ended, {}
            self._reported_at = time.monotonic()
        return ended

    def abort(self, names: Sequence[SampleId]) -> None:
        """End conversations without a result; unknown ones are ignored."""
        self._loop.run(self._abort(names))

    def take_reward_counts(self) -> RunCounts:
        """Return the rewards' retries and replaced processes since the last call."""
        counts = [scorer.take_counts() for scorer in set(self._scorers.values())]
        return functools.reduce(RunCounts.plus, counts, RunCounts())

    def take_stats(self) -> RouterStats:
        """Return the router's statistics since the last call; conversations go on."""

        async def take() -> RouterStats:
            return RouterStats() if self._router is None else self._router.take_stats()

        return self._loop.run(take())

    def stored_turns(self) -> dict[SampleId, list[StoredTurn]]:
        """Return the turns of unfinished conversations; see :class:`~megarl.agents.types.ConversationService`."""

        async def store() -> dict[SampleId, list[StoredTurn]]:
            if self._router is None:
                return {}
            async with self._router.interrupted() as requests:
                parts = {context_digest(r.prompt_ids, r.seed): r.prior for r in requests if r.prior is not None}
                return {name: self._records[name].stored(parts) for name in self._tasks if name in self._records}

        return self._loop.run(store())

    def close(self) -> RouterStats:
        """Abort the remaining conversations; when it returns, no replica has a request of this runner."""
        stats = self._loop.run(self._close())
        self._reset()
        return stats

    def endpoint_metrics(self) -> dict[str, float]:
        """Return the ``endpoint/*`` metrics of external requests since the last call; empty without an endpoint."""
        return {} if self.endpoint is None else self.endpoint.take_metrics()

    def shutdown(self) -> None:
        """End everything; the runner cannot be used afterwards."""
        self._resources.close()

    def _reset(self) -> None:
        """Drop all results; a call of :meth:`finished` in progress returns."""
        with self._changed:
            self._failure, self._ended, self._pending = None, {}, 0
            self._epoch += 1
            self._changed.notify_all()

    def _is_over(self, epoch: int) -> bool:
        return self._failure is not None or self._epoch != epoch

    async def _open(self, replicas: Mapping[int, Replica], client: str) -> None:
        # A weight sync may replace the last replica, so requests wait for that.
        self._router = Router(replicas, self._capacity, self._timeout_s, client, waits_for_replicas=True)
        await self._scope.enter_async_context(self._router)
        await self._scope.enter_async_context(monitored_loop())
        serving = self.endpoint.serving(self._router.generate) if self.endpoint else nullcontext()
        await self._scope.enter_async_context(serving)

    async def _close(self) -> RouterStats:
        await self._abort(list(self._tasks))
        try:
            await self._scope.aclose()
        finally:
            router, self._router = self._router, None
        return RouterStats() if router is None else router.stats

    async def _abort(self, names: Sequence[SampleId]) -> None:
        tasks = [task for name in names if (task := self._tasks.pop(name, None)) is not None]
        for name in names:
            self._records.pop(name, None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with self._changed:
            self._pending -= len(tasks)
            self._changed.notify_all()

    def _start(self, groups: Sequence[ConversationGroup]) -> None:
        try:
            assert self._router is not None
            for group in groups:
                for name in group.ids:
                    images = list(group.facts.get(IMAGES) or ())  # later turns add to them
                    generate = partial(self._router.generate, images=images)
                    if group.with_turns:
                        self._records[name] = TurnRecord(generate, group.turns.get(name.sample, ()))
                    task = self._loop.loop.create_task(self._lead(name, group, generate, images))
                    task.add_done_callback(partial(self._end, name, group))
                    self._tasks[name] = task
        except Exception as error:  # the event loop would log it only
            self._fail(error)

    def _end(self, name: SampleId, group: ConversationGroup, task: asyncio.Task[Trajectory]) -> None:
        """Hand out the sample of a task, however it has ended; the step waits for all samples."""
        if self._tasks.get(name) is not task:  # aborted
            return
        del self._tasks[name]
        self._records.pop(name, None)
        error = asyncio.CancelledError("its task was cancelled") if task.cancelled() else task.exception()
        if isinstance(error, (*FATAL, RewardError)):  # a RewardError: the reward processes do not start
            self._fail(error)
            return
        trajectory = task.result() if error is None else _failed(group.prompt_ids.tolist(), _describe(error))
        with self._changed:
            self._pending -= 1
            self._ended[name] = trajectory
            self._changed.notify_all()

    async def _lead(
        self, name: SampleId, group: ConversationGroup, generate: GenerateWithRoutes, images: list[Image]
    ) -> Trajectory:
        """Lead one conversation and score its trajectory.

        A sample that waits for its score is unfinished: a checkpoint stores its turns.
        """
        turns = self._records.get(name)
        if turns is not None:
            generate = turns.generate
        routes = RouteRecord(generate) if group.with_routes else None
        conversation = Conversation(
            messages=copy.deepcopy(group.messages),  # an agent may change them, and the samples of a group share them
            params=group.params[name.sample],
            prompt_ids=group.prompt_ids.tolist(),
            seed=group.seeds[name.sample],
            key=group.key,
            agent_name=group.agent_name,
            facts=copy.deepcopy(group.facts),
            limits=self._limits,
            image_reader=self._image_reader,
            images=images,
        )
        async with self._slots:
            trajectory = await lead_conversation(
                conversation, self._loops[group.agent_name], generate if routes is None else routes.generate
            )
        if turns is not None and turns.was_led_again:
            trajectory = replace(trajectory, metrics={**trajectory.metrics, LED_AGAIN: 1.0})
        if (scorer := self._scorers.get(group.reward)) is not None:
            trajectory = replace(trajectory, outcome=await scorer.score(group.facts, trajectory))
            self._scored += 1
        return trajectory if routes is None else routes.add_to(trajectory)

    @functools.cached_property
    def _image_reader(self) -> ImageReader | None:
        return image_reader(self._config)

    def _fail(self, error: Exception) -> None:
        """Let :meth:`finished` raise an error, the first one if there are several."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def request_capacity(slots: int) -> int:
    """Return the concurrent requests per engine: an eighth above its slots, so that free slots are refilled."""
    return slots + slots // 8


async def lead_conversation(conversation: Conversation, loop: AgentLoop, generate: Generate) -> Trajectory:
    """Lead one conversation to its end.

    If it failed, ``error`` of its trajectory is set, and the response mask is zero.

    Raises:
        RolloutError, WorkerError, WeightSyncError: no conversation can go on.
    """
    seconds = conversation.limits.seconds
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            trajectory = await loop.run(conversation, generate)
    except (Exception, SystemExit) as error:  # sys.exit of an agent or tool would end the event loop
        if isinstance(error, FATAL) and not isinstance(error, RequestRefused):
            raise
        cause = _describe(error)
        if isinstance(error, TimeoutError) and deadline.expired():
            cause = f"the conversation took longer than {seconds:g} s"
        return _failed(conversation.prompt_ids, cause)
    if conversation.image_reader is not None:
        try:
            trajectory = replace(trajectory, images=_later_images(trajectory, conversation))
        except ValueError as error:
            return _failed(conversation.prompt_ids, f"agent loop {conversation.agent_name!r}: {error}")
    problem = _problem(trajectory, conversation)
    return trajectory.failed(problem) if problem else trajectory


def _later_images(trajectory: Trajectory, conversation: Conversation) -> list[Image]:
    """Find the images in a trajectory's tokens that its data row does not have.

    Raises:
        ValueError: the tokens of an image are incomplete, or no turn has read it.
    """
    parts = (trajectory.prompt_ids, trajectory.response_ids)
    keys = dict.fromkeys(span.key for part in parts for span in image_spans(part))
    images = {image.key: image for image in conversation.images}
    if unknown := keys.keys() - images:
        raise ValueError(f"there are tokens of image {min(unknown):x}, which is not among the conversation's images")
    of_row = {image.key for image in conversation.facts.get(IMAGES) or ()}
    return [images[key] for key in keys if key not in of_row]


def _problem(trajectory: Trajectory, conversation: Conversation) -> str | None:
    """Check a loop's trajectory; return the problem, or None."""
    length = len(trajectory.response_ids)
    for name in ("response_mask", "log_probs"):
        entries = len(getattr(trajectory, name))
        if entries != length:
            return f"agent loop {conversation.agent_name!r}: {entries} entries of {name} for {length} response tokens"
    if conversation.image_reader is not None:
        shown = np.asarray(trajectory.response_ids) < 0
        if bool((shown & (np.asarray(trajectory.response_mask) != 0)).any()):
            return f"agent loop {conversation.agent_name!r}: response_mask is not 0 at the tokens of an image"
    if conversation.params.support and length and trajectory.error is None:
        support = no_support(0, 1) if trajectory.support is None else trajectory.support
        if len(support) != length or bool((np.asarray(trajectory.response_mask)[support[:, 0] < 0] != 0).any()):
            return f"agent loop {conversation.agent_name!r}: generated tokens have no support, see Completion.support"
    if length > conversation.response_tokens:
        limit = conversation.response_tokens
        return f"agent loop {conversation.agent_name!r}: {length} response tokens, {limit} are allowed"
    return trajectory.error


def _failed(prompt_ids: Sequence[int], cause: str) -> Trajectory:
    return Trajectory(prompt_ids, [], [], [], "error", 1, error=cause)


def _describe(error: BaseException) -> str:
    if isinstance(error, AgentError | RequestRefused):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    location = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__}: {error}{location}"
