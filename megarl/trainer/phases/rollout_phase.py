"""Rollout phase: agent loops turn a batch of prompts into a batch of samples, on the rollout replicas."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.agents.build import default_agent_loop
from megarl.agents.runner import request_capacity
from megarl.agents.trajectories import report_failures, trajectories_to_batch, trajectory_metrics
from megarl.agents.types import (
    TRAINING_REWARD,
    VALIDATION_REWARD,
    ConversationGroup,
    Integers,
    PlannedSample,
    Trajectory,
)
from megarl.base.errors import WeightSyncError
from megarl.base.seeds import derive_seed
from megarl.config.schema.async_training import SYNC
from megarl.config.schema.jobs import GenerationJobConfig, TrainConfig
from megarl.config.schema.rollout import TrainingRolloutConfig, ValSamplingConfig
from megarl.data import DataProto
from megarl.rewards.outcome import REWARD_COUNTS
from megarl.rollout.interface import NO_VERSION, SamplingParams
from megarl.rollout.router_stats import RouterStats
from megarl.trainer.metrics.step_metrics import Metrics
from megarl.trainer.phases.rollout_traffic import WAIT_S, RolloutTraffic

TRAINING, VALIDATION = 0, 1
"""Seed streams of training and validation."""
AGENT_NAME = "agent_name"
"""Column with the name of a row's agent loop."""
ROLLOUT_METRICS = "rollout_metrics"
"""Key in the ``meta_info`` of a validation batch: metrics of its conversations."""


class RolloutPhase:
    """Generates samples with the rollout replicas, one conversation per sample.

    The random draws of a sample depend only on the seed, the step, the index of the prompt in the batch and the index
    of the sample. They do not depend on the replicas or on batching.

    Args:
        traffic: conversations on the rollout replicas, shared with the rollout service.
        config: complete.
        tokenizer: of the policy.
        batch_info: ``meta_info`` of training batches, such as the rows of a mini-batch.
        on_lost: receives the numbers of lost replicas, after the other replicas have finished.
        state_masking: exclude tokens of tools and searches from training.
    """

    def __init__(
        self,
        traffic: RolloutTraffic,
        config: GenerationJobConfig,
        tokenizer: PreTrainedTokenizerBase,
        batch_info: Mapping[str, Any] = MappingProxyType({}),
        on_lost: Callable[[Collection[int]], None] = lambda lost: None,
        state_masking: bool = True,
    ) -> None:
        self.traffic = traffic
        self.config = config
        self.rollout = config.actor_rollout_ref.rollout
        self.tokenizer = tokenizer
        self.batch_info = batch_info
        self.state_masking = state_masking
        asynchronous = config.async_training if isinstance(config, TrainConfig) else None
        self.with_versions = asynchronous is not None and asynchronous.mode != SYNC
        self.with_routes = config.actor_rollout_ref.replays_engine_routes
        self.with_turns = self.with_versions and asynchronous is not None and asynchronous.partial_rollout
        self.on_lost = on_lost
        self._default_loop = default_agent_loop(config)
        self._lengths = LengthPredictor()

    def generate_sequences(
        self,
        prompts: DataProto,
        step: int,
        metrics: Metrics,
        generation_round: int = 0,
        *,
        with_baseline: bool = False,
    ) -> DataProto:
        """Generate ``n`` samples per prompt as adjacent rows; the column ``uid`` names the prompt.

        Args:
            prompts: of the step, or of one round of dynamic sampling.
            step: global step.
            metrics: gets the metrics of the conversations.
            generation_round: number of the round in the step.
            with_baseline: add a greedy sample after the others of a prompt, with ``is_baseline`` True (ReMax).
        """
        stream = (TRAINING, step, generation_round) if generation_round else (TRAINING, step)
        sampling = self.rollout
        assert isinstance(sampling, TrainingRolloutConfig), "a job without training samples as in validation"
        batch, conversation_metrics = self._generate(prompts, sampling, sampling.n, stream, with_baseline)
        if with_baseline:
            rows = np.arange(len(batch)) % (sampling.n + 1)
            batch = batch.with_columns({}, {"is_baseline": (rows == sampling.n).tolist()})
        metrics |= conversation_metrics | self.traffic.runners.endpoint_metrics()
        batch.meta_info |= self.batch_info
        return batch

    def validate(self, prompts: DataProto, step: int, batch: int = 0) -> DataProto:
        """Generate samples with the sampling parameters of validation.

        Args:
            prompts: held-out prompts.
            step: seeds the draws.
            batch: number of the validation batch in the step.

        Returns:
            Samples; ``meta_info[ROLLOUT_METRICS]`` holds the metrics of the conversations.
        """
        sampling = self.rollout.val_kwargs
        samples, conversation_metrics = self._generate(prompts, sampling, sampling.n, (VALIDATION, step, batch))
        samples.meta_info[ROLLOUT_METRICS] = conversation_metrics
        return samples

    def _generate(
        self,
        prompts: DataProto,
        sampling: TrainingRolloutConfig | ValSamplingConfig,
        samples: int,
        stream: tuple[int, ...],
        with_baseline: bool = False,
    ) -> tuple[DataProto, Metrics]:
        params = SamplingParams.of(sampling, self.config.data.max_response_length)
        params_per_sample = [params] * samples + [dataclasses.replace(params, temperature=0.0)] * with_baseline
        rows = range(len(prompts))
        seeds = [self._seed(stream, row) for row in rows]
        # The rollout service numbers its groups from 0; these are in flight at the same time.
        numbers, keys = [-1 - row for row in rows], [str(row) for row in rows]
        with_routes = self.with_routes and sampling is self.rollout
        reward = VALIDATION_REWARD if stream[0] == VALIDATION else TRAINING_REWARD
        groups = self._groups(prompts, params_per_sample, seeds, numbers, keys, reward, with_routes=with_routes)
        trajectories, traffic = self._lead(groups)
        if traffic.to_replace:
            self.on_lost(traffic.to_replace)
        uids = [_uid(stream, row) for row in rows]
        batch = self._with_columns_of(prompts.non_tensor_batch, uids, trajectories, with_routes=with_routes)
        return batch, trajectory_metrics(trajectories) | traffic.metrics()

    def _lead(self, groups: Sequence[ConversationGroup]) -> tuple[list[Trajectory], RouterStats]:
        """Run all conversations; return trajectories in the order of the groups and their samples."""
        names = [name for group in groups for name in group.ids]
        trajectories = dict.fromkeys(names)
        shared = self.traffic.is_open  # with conversations of the rollout service, which go on
        try:
            self.traffic.submit(self._with_expected_lengths(groups))
            waiting = set(names)
            while waiting:
                for name, trajectory in self.traffic.finished(WAIT_S, waiting):
                    waiting.remove(name)
                    trajectories[name] = trajectory
        except Exception:
            if self.traffic.is_open and not shared:
                with contextlib.suppress(Exception):  # the first error is the cause
                    self.traffic.close()
            raise
        stats = RouterStats() if shared else self.traffic.close()
        ended = [trajectory for trajectory in trajectories.values() if trajectory is not None]
        report_failures(ended)
        self._lengths.update(ended)
        return ended, stats

    def _with_expected_lengths(self, groups: Sequence[ConversationGroup]) -> Sequence[ConversationGroup]:
        """Add expected lengths if requests queue.

        If all requests start at once, their assignment depends on the batch alone, and a run repeats bit for bit.
        """
        slots = request_capacity(self.rollout.max_num_seqs) * len(self.traffic.replicas())
        if sum(len(group.samples) for group in groups) <= slots:
            return groups
        lengths = self._lengths
        return [dataclasses.replace(group, expected_tokens=lengths.expected(group.prompt_ids)) for group in groups]

    def training_params(self) -> SamplingParams:
        """Return the sampling parameters of training."""
        assert isinstance(self.rollout, TrainingRolloutConfig), "a job without training samples as in validation"
        return SamplingParams.of(self.rollout, self.config.data.max_response_length)

    def training_groups(
        self, prompts: DataProto, origins: Sequence[tuple[int, int]], numbers: Sequence[int]
    ) -> Sequence[ConversationGroup]:
        """Build the groups of prompts that the rollout service admits.

        Args:
            prompts: one per group.
            origins: step and place in its batch of each prompt in synchronous training, which seed its samples.
            numbers: number of each group, from 0.
        """
        assert isinstance(self.rollout, TrainingRolloutConfig)
        seeds = [self._seed((TRAINING, step), place) for step, place in origins]
        keys = [_uid((TRAINING, step), place) for step, place in origins]
        params = [self.training_params()] * self.rollout.n
        groups = self._groups(prompts, params, seeds, numbers, keys, TRAINING_REWARD, with_routes=self.with_routes)
        groups = [dataclasses.replace(group, with_turns=self.with_turns) for group in groups]
        return self._with_expected_lengths(groups)

    def batch_of(
        self, groups: Sequence[ConversationGroup], trajectories: Sequence[Trajectory]
    ) -> tuple[DataProto, Metrics]:
        """Build a training batch of finished groups, and the metrics of its conversations.

        Args:
            groups: see :meth:`training_groups`.
            trajectories: of their samples, in the order of the groups.
        """
        report_failures(trajectories)
        self._lengths.update(trajectories)
        names = dict.fromkeys(name for group in groups for name in group.facts)
        columns = {name: [group.facts.get(name) for group in groups] for name in names}
        uids = [group.key for group in groups]
        batch = self._with_columns_of(columns, uids, trajectories, with_routes=self.with_routes)
        batch.meta_info |= self.batch_info
        return batch, trajectory_metrics(trajectories)

    def _seed(self, stream: tuple[int, ...], row: int) -> int:
        """Return the seed of a prompt of a stream: number ``row`` of a generator, without drawing those before it."""
        bits = np.random.PCG64([self.rollout.seed or 0, *stream]).advance(row)
        return int(np.random.Generator(bits).integers(0, 2**62))  # 2^62 divides 2^64: one draw per number

    def _with_columns_of(
        self,
        columns: Mapping[str, Sequence[Any] | np.ndarray],
        uids: Sequence[str],
        trajectories: Sequence[Trajectory],
        *,
        with_routes: bool,
    ) -> DataProto:
        """Build a batch of trajectories with the columns of their prompts."""
        batch = trajectories_to_batch(
            trajectories,
            self.tokenizer.pad_token_id or 0,
            state_masking=self.state_masking,
            with_versions=self.with_versions,
            with_routes=with_routes,
        )
        batch.meta_info[REWARD_COUNTS] = self.traffic.runners.take_reward_counts()
        prompts = DataProto.from_dict({}, {**columns, "uid": uids})
        return batch.union(prompts.repeat(len(trajectories) // len(uids)))

    def _groups(
        self,
        prompts: DataProto,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        numbers: Sequence[int],
        keys: Sequence[str],
        reward: str,
        *,
        with_routes: bool,
    ) -> list[ConversationGroup]:
        """Build one group per prompt, with one conversation per entry of ``params``."""
        ids = prompts.unpadded("prompts", torch.int32)
        rows = [{name: column[row] for name, column in prompts.non_tensor_batch.items()} for row in range(len(prompts))]
        return [
            ConversationGroup(
                number=numbers[row],
                messages=rows[row].get("raw_prompt", ()),
                prompt_ids=ids[row].numpy(),
                samples=[
                    PlannedSample(sample, sampling, derive_seed(seeds[row], sample))
                    for sample, sampling in enumerate(params)
                ],
                key=keys[row],
                agent_name=str(rows[row].get(AGENT_NAME) or self._default_loop),
                facts=rows[row],
                with_routes=with_routes,
                reward=reward,
            )
            for row in range(len(prompts))
        ]


def _uid(stream: tuple[int, ...], row: int) -> str:
    """Return the name of a prompt, unique in the run."""
    return "-".join(map(str, (*stream, row)))


def check_weight_versions(batch: DataProto, version: int) -> None:
    """Check that all samples were generated by the current weight version; samples without a version pass.

    Raises:
        WeightSyncError: a sample has another version, so its log-probs belong to another policy.
    """
    versions = batch.non_tensor_batch["weight_version"].astype(np.int64)
    wrong = versions[(versions != version) & (versions != NO_VERSION)]
    if len(wrong):
        others = ", ".join(map(str, np.unique(wrong).tolist()))
        raise WeightSyncError(
            f"{len(wrong)} of {len(versions)} samples were generated by weight version {others} instead of {version}: "
            "a rollout replica does not serve the weights of the last sync. Resume the run from its last checkpoint",
            code="sync.other-version",
        )


class LengthPredictor:
    """Predicts response lengths from the last samples of the same prompt, so that the longest start first.

    Predictions change only the order of requests, not the samples. A resumed run may start with an empty predictor.

    Args:
        capacity: prompts to remember; the prompts sampled longest ago are forgotten first.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity
        self._means: dict[int, float] = {}

    def expected(self, prompt_ids: Integers) -> float | None:
        """Predict the generated tokens per turn; None for a new prompt."""
        return self._means.get(_digest(prompt_ids))

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the lengths of finished trajectories."""
        tokens, turns = defaultdict[int, int](int), defaultdict[int, int](int)
        for trajectory in trajectories:
            if trajectory.error is None:
                prompt, mask = _digest(trajectory.prompt_ids), np.asarray(trajectory.response_mask, np.uint8).tobytes()
                tokens[prompt] += sum(mask)
                turns[prompt] += mask.startswith(b"\1") + mask.count(b"\0\1")
        for prompt in filter(turns.__getitem__, tokens):
            self._means.pop(prompt, None)  # a dict keeps the place of an old key: the newest come last
            self._means[prompt] = tokens[prompt] / turns[prompt]
        while len(self._means) > self.capacity:
            del self._means[next(iter(self._means))]


def _digest(prompt_ids: Integers) -> int:
    return hash(np.asarray(prompt_ids, np.int32).tobytes())
