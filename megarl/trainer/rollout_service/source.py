"""Sources of scored samples: rounds within a step in synchronous mode, or the rollout service across steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megarl.base.reductions import combine_metrics
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto
from megarl.data.loader import PromptQueue
from megarl.trainer.metrics.step_metrics import GENERATED_TOKENS, Metrics
from megarl.trainer.phases.dynamic_sampling import SampleCollector, join
from megarl.trainer.phases.reward_phase import RewardPhase
from megarl.trainer.phases.rollout_phase import RolloutPhase, check_weight_versions
from megarl.trainer.roles.job_roles import Roles

TimedPhase = Callable[[str], AbstractContextManager[object]]
"""Times a phase of the step under its name."""


class SampleSource(Protocol):
    """Source of the scored samples that a step trains on."""

    def batches(self, step: int, phase: TimedPhase) -> Generator[tuple[DataProto, Metrics]]:
        """Yield the batches of a step as their groups are complete, each with its metrics of generation and scoring.

        Args:
            step: global step.
            phase: times ``gen`` and ``reward``.

        Raises:
            StepImpossible: there is no batch to train on, for example because all rollout replicas are lost.
            WeightSyncError: a sample has tokens of other weight versions than the mode allows.
        """

    def sync_weights(self) -> Metrics:
        """Send the actor's weights to the rollout replicas after the batches of a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the work in flight, for a checkpoint; empty if steps leave none."""

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the work in flight of the checkpoint of a step; before the first weight sync.

        Args:
            state: see :meth:`state_dict`.
            step: of the checkpoint; 0 = a new run.
        """

    def close(self) -> None:
        """Abandon the work in flight."""


class StepRounds:
    """Generates and scores the samples of a step within the step (synchronous mode), in rounds of dynamic sampling.

    Args:
        config: complete.
        prompts: queue of training prompts.
        rollout: generates.
        rewards: scores.
        roles: worker groups.
    """

    def __init__(
        self, config: TrainConfig, prompts: PromptQueue, rollout: RolloutPhase, rewards: RewardPhase, roles: Roles
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.rollout = rollout
        self.rewards = rewards
        self.roles = roles
        self.collector = SampleCollector(config)

    def batches(self, step: int, phase: TimedPhase) -> Generator[tuple[DataProto, Metrics]]:
        """Yield the one batch of the step; see :meth:`SampleSource.batches`."""
        collector, missing = self.collector, self.collector.round_size
        while missing:
            prompts, round_metrics = self.prompts.take(missing), Metrics()
            with phase("gen"):
                self.roles.ready_engines()
                batch = self.rollout.generate_sequences(
                    prompts, step, round_metrics, collector.rounds, with_baseline=self.config.uses_baselines
                )
                check_weight_versions(batch, self.roles.sharding_manager.version)
                self.roles.free_engines()
            with phase("reward"):
                scored = self.rewards.score(batch)
                missing = collector.add(scored.batch, round_metrics | scored.metrics)
        metrics: Metrics = {}
        yield collector.finish(metrics), metrics

    def sync_weights(self) -> Metrics:
        """Send the actor's weights; see :meth:`SampleSource.sync_weights`."""
        return self.roles.sync_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a step ends without work in flight."""
        return {}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Do nothing: a step ends without work in flight."""

    def close(self) -> None:
        """Do nothing: a step ends without work in flight."""


class TrainedBatches:
    """Joins the batches of a step and their metrics."""

    def __init__(self) -> None:
        self._batches: list[DataProto] = []
        self._trained: list[DataProto] = []
        self._metrics: list[tuple[Metrics, int]] = []

    def add(self, batch: DataProto, trained: DataProto, metrics: Metrics) -> None:
        """Add a scored batch, and the rows of its updates: PF-PPO draws other rows of the batch."""
        self._batches.append(batch)
        self._trained.append(trained)
        self._metrics.append((metrics, len(batch)))

    def joined(self) -> tuple[DataProto, DataProto, Metrics]:
        """Return the scored rows and the trained rows of the step, and its metrics; see :func:`combine_metrics`."""
        tokens = sum(batch.meta_info[GENERATED_TOKENS] for batch in self._batches)
        for batch in (*self._batches, *self._trained):
            batch.meta_info[GENERATED_TOKENS] = tokens
        return join(self._batches), join(self._trained), combine_metrics(self._metrics)
