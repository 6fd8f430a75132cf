"""Conversations on the rollout replicas: groups of training and validation out, batches of their samples back."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.agents.build import default_agent_loop
from megarl.agents.trajectories import report_failures, trajectories_to_batch, trajectory_metrics
from megarl.agents.types import (
    AGENT_NAME,
    TRAINING_REWARD,
    VALIDATION_REWARD,
    ConversationGroup,
    ConversationService,
    SampleId,
    StoredTurn,
    Trajectory,
    narrow_ids,
)
from megarl.base.image_tokens import Image, image_spans
from megarl.base.reductions import Metrics
from megarl.base.seeds import derive_seed
from megarl.config.schema.algorithm import SYNC
from megarl.config.schema.jobs import GenerationJobConfig, TrainConfig
from megarl.config.schema.rollout import TrainingRolloutConfig
from megarl.data import DataProto
from megarl.data.images import IMAGE_COUNTS, IMAGES
from megarl.rewards.outcome import REWARD_COUNTS
from megarl.rollout.interface import SamplingParams
from megarl.rollout.router import Replica, RouterStats

TRAINING, VALIDATION = 0, 1
"""Seed streams of training and validation."""
BASELINE = "is_baseline"
"""Column that marks the greedy samples of ReMax."""
ROLLOUT_METRICS = "rollout_metrics"
"""Key in the ``meta_info`` of a validation batch: metrics of its conversations."""
WAIT_S = 1.0
"""Timeout of one wait for finished samples, in seconds; callers wait again."""
STORED = ("number", "prompt_ids", "key", "agent_name", "facts", "seeds")
"""Fields of a group that a checkpoint has; the others follow from them."""


class IdleClock:
    """Measures the share of a sync interval in which the trainer waits for samples, under verl's names.

    An interval ends with a weight sync, and the next one begins with it.

    Args:
        clock: monotonic clock in seconds.

    Attributes:
        waited_s: seconds of the current interval in which the trainer has waited.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self.waited_s = 0.0

    def start(self) -> None:
        """Begin the first interval; later calls have no effect."""
        if self._began is None:
            self._began = self._clock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait of the trainer."""
        started = self._clock()
        try:
            yield
        finally:
            self.waited_s += self._clock() - started

    def metrics(self, utilization: float) -> Metrics:
        """End an interval, and return ``fully_async/{trainer,rollouter}/idle_ratio``.

        Args:
            utilization: mean share of the interval in which an engine had a request.
        """
        now, began, waited = self._clock(), self._began, self.waited_s
        self._began, self.waited_s = now, 0.0
        if began is None or now <= began:
            return {}
        return {
            "fully_async/trainer/idle_ratio": waited / (now - began),
            "fully_async/rollouter/idle_ratio": 1.0 - utilization,
        }


class Rollouts:
    """Leads conversations on the rollout replicas, in training and validation.

    The random draws of a sample depend only on the seed, the number of its group and its number in the group. They do
    not depend on the replicas, on batching or on time. Groups of training are numbered from 0, groups of validation
    from -1 downwards, so both may be in flight at the same time.

    Args:
        replicas: returns the current rollout replicas by number, since they may be replaced, join and leave.
        batch_info: ``meta_info`` of training batches, such as the rows of a mini-batch.
        on_lost: receives the numbers of lost replicas when no conversation is in flight.
        state_masking: exclude tokens of tools and searches from training.
        store_images: puts references in place of the files of a prompt's images; by default, the files travel.

    Attributes:
        is_open: whether the runners hold the replicas; from a submission to :meth:`close`.
        idle: waits of the trainer for samples since the last weight sync.
    """

    def __init__(
        self,
        runners: ConversationService,
        replicas: Callable[[], Mapping[int, Replica]],
        config: GenerationJobConfig,
        tokenizer: PreTrainedTokenizerBase,
        batch_info: Mapping[str, Any] = MappingProxyType({}),
        on_lost: Callable[[Collection[int]], None] = lambda lost: None,
        state_masking: bool = True,
        store_images: Callable[[Sequence[Image]], Sequence[Image]] = tuple,
    ) -> None:
        self.runners = runners
        self.replicas = replicas
        self.config = config
        self.rollout = config.actor_rollout_ref.rollout
        self.tokenizer = tokenizer
        self.batch_info = batch_info
        self.on_lost = on_lost
        self.state_masking = state_masking
        self._store_images = store_images
        self.is_open, self.idle = False, IdleClock()
        asynchronous = config.async_training if isinstance(config, TrainConfig) else None
        self.with_versions = asynchronous is not None and asynchronous.mode != SYNC
        self.with_routes = config.actor_rollout_ref.replays_engine_routes
        self.with_turns = self.with_versions and asynchronous is not None and asynchronous.partial_rollout
        self.with_baseline = isinstance(config, TrainConfig) and config.uses_baselines
        self._default_loop = default_agent_loop(config)
        self._served: Mapping[int, Replica] = {}
        self._ended: dict[SampleId, Trajectory] = {}
        self._awaited: set[SampleId] = set()
        self._validated: dict[SampleId, Trajectory] = {}

    def submit(self, groups: Sequence[ConversationGroup]) -> None:
        """Start conversations, without waiting for them."""
        if not self.is_open:
            self._served = self.replicas()
            self.runners.open(self._served)
            self.is_open = True
        self.runners.submit(groups)

    def update_replicas(self) -> None:
        """Send changed replicas to the conversations in flight; see :meth:`ConversationService.set_replicas`."""
        replicas = self.replicas()
        if self.is_open and replicas != self._served:
            self.runners.set_replicas(replicas)
            self._served = replicas

    def finished(self, wait_s: float) -> dict[SampleId, Trajectory]:
        """Return the trajectories of training that have ended; wait for the first one, at most ``wait_s`` seconds.

        Raises:
            MegarlError: no conversation can go on; none is in flight any more.
        """
        if self.is_open:
            self._receive(0.0 if self._ended else wait_s)
        ended, self._ended = self._ended, {}
        return ended

    def close(self) -> RouterStats:
        """Abort the conversations in flight; when it returns, no replica has a request."""
        if not self.is_open:
            return RouterStats()
        self.is_open, self._ended = False, {}
        self._awaited &= self._validated.keys()
        return self.runners.close()

    def finish(self) -> RouterStats:
        """Close, and replace lost replicas."""
        stats = self.close()
        if stats.to_replace:
            self.on_lost(stats.to_replace)
        return stats

    def begin_validation(self, prompts: DataProto, step: int, batch: int = 0) -> list[ConversationGroup]:
        """Start validation samples; training conversations go on.

        Args:
            step: seeds the draws.
            batch: number of the validation batch in the step.
        """
        sampling, last = self.rollout.val_kwargs, -1 - len({name.group for name in self._awaited})
        params = [SamplingParams.of(sampling, self.config.data.max_response_length)] * sampling.n
        origins = [(VALIDATION, step, batch, row) for row in range(len(prompts))]
        groups = [
            self._group(last - row, self._seed(origin), _uid(origin), params, VALIDATION_REWARD, ids, facts)
            for row, (origin, (ids, facts)) in enumerate(zip(origins, _prompt_rows(prompts), strict=True))
        ]
        self._awaited |= {name for group in groups for name in group.ids}
        self.submit(groups)
        return groups

    @property
    def validates(self) -> bool:
        """Whether validation samples are in flight, or wait for :meth:`end_validation`."""
        return bool(self._awaited)

    def wait_validated(self) -> None:
        """Wait for the validation samples in flight: all have the weights with which they began."""
        while not self._validated.keys() >= self._awaited:
            self._receive(WAIT_S)

    def end_validation(self, groups: Sequence[ConversationGroup]) -> DataProto:
        """Wait for validation samples, and build their batch.

        Returns:
            ``n`` adjacent rows per prompt; the column ``uid`` names the prompt. ``meta_info[ROLLOUT_METRICS]`` has the
            metrics of the conversations.
        """
        self.wait_validated()
        names = [name for group in groups for name in group.ids]
        trajectories = [self._validated.pop(name) for name in names]
        self._awaited -= set(names)
        report_failures(trajectories)
        samples = self._with_facts(groups, trajectories)
        samples.meta_info[ROLLOUT_METRICS] = trajectory_metrics(trajectories)
        return samples

    def validate(self, prompts: DataProto, step: int, batch: int = 0) -> DataProto:
        """Generate validation samples and wait for them; see :meth:`begin_validation` and :meth:`end_validation`."""
        shared = self.is_open
        try:
            samples = self.end_validation(self.begin_validation(prompts, step, batch))
        except Exception:
            if self.is_open and not shared:
                with contextlib.suppress(Exception):  # the first error is the cause
                    self.close()
            raise
        stats = RouterStats() if shared else self.finish()
        samples.meta_info[ROLLOUT_METRICS] |= stats.metrics()
        return samples

    @property
    def samples_per_group(self) -> int:
        """Samples per prompt of training, ReMax's greedy baseline included."""
        return len(self._training_params)

    @property
    def _training_params(self) -> list[SamplingParams]:
        """Sampling parameters by sample of a training group; the greedy baseline is the last."""
        assert isinstance(self.rollout, TrainingRolloutConfig), "a job without training samples"
        params = SamplingParams.of(self.rollout, self.config.data.max_response_length)
        greedy = [dataclasses.replace(params, temperature=0.0)] * self.with_baseline
        return [params] * self.rollout.n + greedy

    def training_groups(self, prompts: DataProto, numbers: Sequence[int]) -> list[ConversationGroup]:
        """Build a training group per prompt; their numbers, from 0, seed the samples."""
        params, origins = self._training_params, [self._origin(number) for number in numbers]
        return [
            self._group(number, self._seed(origin), _uid(origin), params, TRAINING_REWARD, ids, facts)
            for number, origin, (ids, facts) in zip(numbers, origins, _prompt_rows(prompts), strict=True)
        ]

    def stored_group(self, group: ConversationGroup) -> dict[str, Any]:
        """Return the fields :data:`STORED` of a training group, with the files of its images."""
        fields = {name: getattr(group, name) for name in STORED}
        if images := group.facts.get(IMAGES):
            fields["facts"] = {**group.facts, IMAGES: tuple(image.fields for image in images)}
        return fields

    def restored_group(self, stored: Mapping[str, Any], turns: Mapping[int, Sequence[StoredTurn]]) -> ConversationGroup:
        """Build a training group from its fields :data:`STORED`, and the turns of its unfinished samples."""
        if images := stored["facts"].get(IMAGES):
            images = self._store_images([Image(*image) for image in images])
            stored = {**stored, "facts": {**stored["facts"], IMAGES: images}}
        return ConversationGroup(
            params=self._training_params,
            messages=stored["facts"].get("raw_prompt", ()),
            with_routes=self.with_routes,
            with_turns=self.with_turns,
            reward=TRAINING_REWARD,
            turns=turns,
            **{name: stored[name] for name in STORED},
        )

    def batch_of(
        self, groups: Sequence[ConversationGroup], trajectories: Sequence[Trajectory]
    ) -> tuple[DataProto, Metrics]:
        """Build a training batch from the trajectories of finished groups; return its conversations' metrics too.

        Returns:
            ``n`` adjacent rows per group; the column ``uid`` names the prompt. With ReMax, a row more, for which the
            column :data:`BASELINE` is True.
        """
        report_failures(trajectories)
        batch = self._with_facts(groups, trajectories, trains=True)
        if self.with_baseline:
            of_group = np.arange(len(batch)) % self.samples_per_group
            batch = batch.with_columns({}, {BASELINE: (of_group == self.samples_per_group - 1).tolist()})
        batch.meta_info |= self.batch_info
        return batch, trajectory_metrics(trajectories)

    def _receive(self, wait_s: float) -> None:
        """Sort finished samples into training and validation."""
        try:
            ended = self.runners.finished(wait_s)
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the cause
                self.close()
            raise
        self._ended |= {name: trajectory for name, trajectory in ended.items() if name.group >= 0}
        self._validated |= {name: trajectory for name, trajectory in ended.items() if name.group < 0}

    def _origin(self, number: int) -> tuple[int, int, int]:
        """Return stream, step and place of a training group if no group is dropped; they seed its samples."""
        assert isinstance(self.config, TrainConfig), "a job without training samples"
        step, place = divmod(number, self.config.data.train_batch_size)
        return TRAINING, step + 1, place

    def _seed(self, origin: tuple[int, ...]) -> int:
        """Return a prompt's seed: a number of its stream's generator, without drawing the numbers before it."""
        *stream, row = origin
        bits = np.random.PCG64([self.rollout.seed or 0, *stream]).advance(row)
        return int(np.random.Generator(bits).integers(0, 2**62))  # 2^62 divides 2^64: one draw per number

    def _group(
        self,
        number: int,
        seed: int,
        key: str,
        params: Sequence[SamplingParams],
        reward: str,
        prompt_ids: np.ndarray,
        facts: Mapping[str, Any],
    ) -> ConversationGroup:
        """Build the group of a prompt, with one conversation per entry of ``params``."""
        trains = reward == TRAINING_REWARD
        if images := facts.get(IMAGES):
            facts = {**facts, IMAGES: self._store_images(images)}
        return ConversationGroup(
            number=number,
            messages=facts.get("raw_prompt", ()),
            prompt_ids=prompt_ids,
            params=params,
            seeds=[derive_seed(seed, sample) for sample in range(len(params))],
            key=key,
            agent_name=str(facts.get(AGENT_NAME) or self._default_loop),
            facts=facts,
            with_routes=self.with_routes and trains,
            with_turns=self.with_turns and trains,
            reward=reward,
        )

    def _with_facts(
        self, groups: Sequence[ConversationGroup], trajectories: Sequence[Trajectory], *, trains: bool = False
    ) -> DataProto:
        """Build a batch of trajectories with the columns of their prompts.

        Training reads the files of later turns' images in other processes, so they go to the store, once per group.
        """
        support = self.rollout.support_tokens if isinstance(self.rollout, TrainingRolloutConfig) else 0
        batch = trajectories_to_batch(
            trajectories,
            self.tokenizer.pad_token_id or 0,
            state_masking=self.state_masking,
            with_versions=self.with_versions,
            with_routes=trains and self.with_routes,
            support_tokens=support if trains else 0,
        )
        batch.meta_info[REWARD_COUNTS] = self.runners.take_reward_counts()
        names = dict.fromkeys(name for group in groups for name in group.facts if name != IMAGES)
        columns = {name: [group.facts.get(name) for group in groups] for name in names}
        prompts = DataProto.from_dict({}, {**columns, "uid": [group.key for group in groups]})
        samples = len(trajectories) // len(groups)
        batch = batch.union(prompts.repeat(samples))
        if not any(IMAGES in group.facts for group in groups):
            return batch
        images = list[Sequence[Image]]()
        for number, group in enumerate(groups):
            of_group = trajectories[number * samples : (number + 1) * samples]
            of_prompt = group.facts.get(IMAGES) or ()
            later = {image.key: image for trajectory in of_group for image in trajectory.images}
            of_turns = self._store_images([*later.values()]) if later and trains else later.values()
            known = {image.key: image for image in (*of_prompt, *of_turns)}
            images += [_row_images(trajectory, of_prompt, known) for trajectory in of_group]
        return batch.with_columns({IMAGE_COUNTS: torch.tensor(list(map(len, images)))}, {IMAGES: images})


def _row_images(trajectory: Trajectory, of_prompt: Sequence[Image], known: Mapping[int, Image]) -> Sequence[Image]:
    """Return the images of a row, in the order of its tokens; ``known`` are the group's by key."""
    if not known:
        return ()
    parts = (trajectory.prompt_ids, trajectory.response_ids)
    row = tuple(known[span.key] for part in parts for span in image_spans(part))
    same = [image.key for image in row] == [image.key for image in of_prompt]
    return of_prompt if same else row  # the samples of a prompt share one object


def _prompt_rows(prompts: DataProto) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Return the token ids and the other columns of each prompt."""
    facts = [{name: column[row] for name, column in prompts.non_tensor_batch.items()} for row in range(len(prompts))]
    return [(narrow_ids(ids.numpy()), row) for ids, row in zip(prompts.unpadded("prompts"), facts, strict=True)]


def _uid(origin: tuple[int, ...]) -> str:
    """Return the name of a prompt, unique in the run."""
    return "-".join(map(str, origin))
