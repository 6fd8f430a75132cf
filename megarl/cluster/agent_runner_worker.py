"""An agent runner as a worker process: its verbs, and its reports to the driver."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.agents.runner import AgentRunner
from megarl.agents.trajectories import PackedSamples
from megarl.agents.types import ConversationGroup, SampleId, StoredTurn, Trajectory
from megarl.base.child_process import ChildEnvironment
from megarl.base.redaction import remember_secrets
from megarl.base.user_code import import_user_modules
from megarl.rewards.pool import RunCounts
from megarl.rewards.scorer import ScorerSpec
from megarl.rollout.router import Replica, RouterStats
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig


@dataclass(frozen=True)
class RunnerReport:
    """Report of an agent runner: finished samples, progress, warnings, failure.

    Attributes:
        progress: generated turns and scored samples so far.
        rewards: retries and replaced processes since the last report.
        failure: error that ended all of its conversations; None = no failure.
    """

    samples: PackedSamples
    progress: int
    warnings: list[str]
    rewards: RunCounts
    failure: Exception | None = None


class AgentRunnerWorker:
    """An agent runner as a worker; see :class:`megarl.agents.runner.AgentRunner`.

    Args:
        environment: of the driver, for reward functions.
    """

    def __init__(
        self,
        place: WorkerPlace,
        *,
        config: GenerationJobConfig,
        tokenizer: PreTrainedTokenizerBase,
        token: str,
        scorers: Mapping[str, ScorerSpec],
        environment: ChildEnvironment,
    ) -> None:
        remember_secrets(dataclasses.asdict(config))
        import_user_modules(*config.actor_rollout_ref.model.user_modules)
        self._runner = AgentRunner(config, tokenizer, place.rank, place.world_size, token, scorers, environment)
        self._warnings = _WarningList()
        logging.getLogger("megarl").addHandler(self._warnings)

    @verb(Dispatch.ALL)
    def open(self, replicas: Mapping[int, Replica], client: str) -> None:
        """Connect the runner to these replicas, under a new client name."""
        self._runner.open(replicas, client)

    @verb(Dispatch.ALL)
    def set_replicas(self, replicas: Mapping[int, Replica]) -> None:
        """Replace the replicas; conversations go on."""
        self._runner.set_replicas(replicas)

    @verb(Dispatch.ALL)
    def start(self, groups: Sequence[ConversationGroup]) -> None:
        """Start conversations."""
        self._runner.submit(groups)

    @verb(Dispatch.RANK)
    def finished(self, wait_s: float) -> RunnerReport:
        """Report finished samples."""
        samples: dict[SampleId, Trajectory] = {}
        failure = None
        try:
            samples = self._runner.finished(wait_s)
        except Exception as error:
            failure = error
        rewards = self._runner.take_reward_counts()
        return RunnerReport(PackedSamples(samples), self._runner.progress, self._warnings.take(), rewards, failure)

    @verb(Dispatch.ALL)
    def abort(self, names: Sequence[SampleId]) -> None:
        """Abort conversations."""
        self._runner.abort(names)

    @verb(Dispatch.RANK)
    def take_stats(self) -> RouterStats:
        """Return the router's statistics since the last call."""
        return self._runner.take_stats()

    @verb(Dispatch.ALL)
    def stored_turns(self) -> dict[SampleId, list[StoredTurn]]:
        """Return the turns of unfinished conversations."""
        return self._runner.stored_turns()

    @verb(Dispatch.ALL)
    def close(self) -> RouterStats:
        """Abort the remaining conversations; return the router's statistics."""
        return self._runner.close()

    @verb(Dispatch.ALL)
    def endpoint_metrics(self) -> dict[str, float]:
        """Return the metrics of external requests."""
        return self._runner.endpoint_metrics()

    @verb(Dispatch.ALL)
    def describe(self) -> str:
        """Describe the chat endpoint in one line; empty without one."""
        return self._runner.endpoint.describe() if self._runner.endpoint else ""

    @verb(Dispatch.ALL)
    def end(self) -> None:
        """Close the chat endpoint, and end the reward processes."""
        self._runner.shutdown()


class _WarningList(logging.Handler):
    """Collects the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def take(self) -> list[str]:
        texts, self._texts = self._texts, []
        return texts
