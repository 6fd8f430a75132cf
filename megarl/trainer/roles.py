"""Which worker groups a job has, and how each is built from the configuration."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megarl.cluster import PerRank, PlacedPool, WorkerFailed, WorkerGroup, WorkerSilent, wait_all, wait_ready
from megarl.cluster.replicas import GroupReplica
from megarl.cluster.sync_peers import GroupSource, GroupTarget
from megarl.config import MegatronConfig, OptimConfig, TrainConfig
from megarl.config.batch import BatchPlan
from megarl.config.supervised import SupervisedConfig
from megarl.errors import WeightSyncError, WorkerError
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.sequence_cost import SequenceCost, sequence_cost
from megarl.sharding import (
    RolloutLayout,
    Routes,
    ShardingManager,
    SyncOptions,
    build_plan,
    replica_parts,
    sender_parts,
)
from megarl.trainer.budgets import budget, update_plan
from megarl.trainer.replicas import restart_replicas, rollout_group, router_replicas
from megarl.trainer.reward_model import reward_model_group
from megarl.workers.layouts import layout_of
from megarl.workers.settings import LogProbSettings, MicroBatchBudget, RoleSettings, UpdatePlan

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

REFERENCE_VERBS = ("compute_ref_log_prob", "compute_ref_representations")
"""What the reference computes, with one budget of tokens."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass
class Roles:
    """The worker groups of a job; a role that the algorithm does not need is None.

    Attributes:
        actor: trains the policy.
        critic: estimates and learns values.
        reference: tells the reference's log-probs and representations; the actor's own group where it lives there.
        reward_model: scores answers.
        rollout: the engine's replicas.
        sharding_manager: copies the actor's weights into the replicas.
        connect: makes a sharding manager for the processes that there are.
    """

    actor: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    reward_model: WorkerGroup | None
    rollout: WorkerGroup
    sharding_manager: ShardingManager
    connect: Callable[[WorkerGroup, WorkerGroup], ShardingManager]

    def replicas(self) -> list[GroupReplica]:
        """The rollout replicas, as the router sees them."""
        return router_replicas(self.rollout)

    def sync_weights(self) -> dict[str, float]:
        """Give the rollout replicas the actor's weights; see :meth:`ShardingManager.sync_weights`."""
        return self._replacing_the_dead(lambda: self.sharding_manager.sync_weights())

    def free_engines(self) -> None:
        """Before training: engines give their devices to the trainer."""
        self._replacing_the_dead(lambda: self.sharding_manager.free_engines())

    def ready_engines(self) -> None:
        """Before generating once more with the same weights: engines that gave their devices away have them again."""
        if not self.sharding_manager.in_sync:
            self.sync_weights()

    def _replacing_the_dead(self, action: Callable[[], _Result]) -> _Result:
        """Does something with all replicas, again and again while each time another one turns out to be dead."""
        for _ in range(self.rollout.world_size):
            try:
                return action()
            except (WeightSyncError, WorkerError) as error:
                lost = _lost_ranks(error, self.rollout.role)
                if not lost:
                    raise
                numbers = ", ".join(map(str, lost))
                logger.warning("rollout replica %s is lost and is replaced: %s", numbers, error)
                self.replace_replicas(lost)
        return action()

    def replace_replicas(self, lost: Collection[int]) -> None:
        """Put new processes in the place of lost replicas; they get the weights with the next sync.

        Raises:
            WorkerError: a new process failed.
        """
        restart_replicas(self.rollout, lost)
        version = self.sharding_manager.version
        self.sharding_manager = self.connect(self.actor, self.rollout)
        self.sharding_manager.version = version

    def describe(self) -> str:
        """What each group of Megatron workers computes with, a line each."""
        groups = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        groups["reward_model"] = self.reward_model
        own = {name: group for name, group in groups.items() if group and (name == "actor" or group is not self.actor)}
        return "\n".join(f"{name}: {group.describe()}" for name, group in own.items())

    def learners(self) -> Iterator[WorkerGroup]:
        """The groups whose state a checkpoint holds."""
        yield self.actor
        if self.critic:
            yield self.critic


def _lost_ranks(error: BaseException | None, role: str) -> list[int]:
    """The ranks of a role whose death or silence, and nobody else's, is behind an error."""
    while error is not None:
        if isinstance(error, WorkerFailed) and error.died and error.role == role:
            return [error.rank]
        if isinstance(error, WorkerSilent) and {of for of, _ in error.late} == {role}:
            return sorted(rank for _, rank in error.late)
        error = error.__cause__
    return []


def run_updates(config: TrainConfig | SupervisedConfig, batches: BatchPlan, phase: str, total_steps: int) -> int:
    """Optimizer steps that a role takes in a whole run, at least those of one training step.

    Args:
        config: complete.
        batches: its batch arithmetic.
        phase: the role's update: ``actor``, ``critic``, or the role of a supervised job.
        total_steps: training steps of the whole run.
    """
    # While the critic warms up, the actor does not learn.
    waits = config.trainer.critic_warmup if phase == "actor" and isinstance(config, TrainConfig) else 0
    return batches.phase(phase).optimizer_steps * max(1, total_steps - waits)


class RoleBuilder:
    """Builds the worker groups of a job.

    Args:
        config: complete, as ``megarl.config.build`` returns it.
        batches: the batch arithmetic of ``config``.
        total_steps: training steps of the whole run.
        pool: devices that all roles share.
    """

    def __init__(
        self,
        config: TrainConfig,
        batches: BatchPlan,
        total_steps: int,
        pool: PlacedPool,
    ) -> None:
        self.config = config
        self.policy = config.actor_rollout_ref
        self.batches = batches
        self.total_steps = total_steps
        self.pool = pool

    def build(self) -> Roles:
        """Start all groups side by side, build their models, and connect the weight sync.

        Raises:
            WorkerError: a process failed; names role and rank.
        """
        actor, rollout = self._actor(), rollout_group(self.policy, self.config.trainer.device, self.pool)
        critic = self._critic() if self._has_critic() else None
        own_reference = self._reference() if self._reference_has_workers() else None
        reward_model = reward_model_group(self.config, self.pool) if self.config.reward_model.enable else None
        groups = [group for group in (actor, rollout, critic, own_reference, reward_model) if group]
        wait_ready(groups)
        wait_all([group.submit("init_model") for group in groups])
        reference = own_reference or (actor if self._has_reference() else None)
        sync = self._connect(actor, rollout)
        return Roles(actor, critic, reference, reward_model, rollout, sync, self._connect)

    def _actor(self) -> WorkerGroup:
        reference = None
        if self._has_reference() and not self._reference_has_workers():
            reference = replace(self._log_prob("ref_log_prob"), full_kl=self.config.algorithm.uses_full_kl)
        actor = self.policy.actor
        kwargs: dict[str, Any] = {
            "settings": self._settings(self.policy.model.path, actor.megatron, actor.optim, "actor"),
            "config": actor,
            "plan": self._update_plan("actor", str(actor.loss_agg_mode), actor.loss_scale_factor),
            "log_prob": self._log_prob("old_log_prob"),
            "reference": reference,
        }
        budgets = {"compute_log_prob": kwargs["log_prob"].budget, "update_actor": kwargs["plan"].budget}
        if reference is not None:
            budgets |= dict.fromkeys(REFERENCE_VERBS, reference.budget)
        return self._group("actor", "megarl.workers.actor:ActorWorker", kwargs, layout_of(actor.megatron), budgets)

    def _critic(self) -> WorkerGroup:
        critic = self.config.critic
        kwargs: dict[str, Any] = {
            "settings": self._settings(str(critic.model.path), critic.megatron, critic.optim, "critic"),
            "config": critic,
            "plan": self._update_plan("critic", str(critic.loss_agg_mode)),
        }
        budgets = dict.fromkeys(("compute_values", "update_critic"), kwargs["plan"].budget)
        return self._group("critic", "megarl.workers.critic:CriticWorker", kwargs, layout_of(critic.megatron), budgets)

    def _reference(self) -> WorkerGroup:
        megatron = self.policy.ref.megatron
        assert megatron is not None
        kwargs: dict[str, Any] = {
            "settings": self._settings(self.policy.model.path, megatron, None, None),
            "log_prob": self._log_prob("ref_log_prob"),
        }
        budgets = dict.fromkeys(REFERENCE_VERBS, kwargs["log_prob"].budget)
        worker = "megarl.workers.reference:ReferenceWorker"
        return self._group("reference", worker, kwargs, layout_of(megatron), budgets)

    def _has_critic(self) -> bool:
        """Whether there is a critic; validation alone needs neither critic nor reference."""
        return self.config.uses_critic and not self.config.trainer.val_only

    def _has_reference(self) -> bool:
        return self.config.uses_reference and not self.config.trainer.val_only

    def _reference_has_workers(self) -> bool:
        return self._has_reference() and self.policy.ref.megatron is not None

    def _connect(self, actor: WorkerGroup, rollout: WorkerGroup) -> ShardingManager:
        sync, config, tp = self.config.sync, self.policy, self.policy.rollout.tensor_model_parallel_size
        train, engines = wait_all([actor.submit("sync_place"), rollout.submit("sync_places")])
        routes = Routes(tuple(train), tuple(itertools.chain(*engines)), sync.transport)
        plan = build_plan(
            WeightMap(read_model_config(config.model.path)),
            actor.layout,
            RolloutLayout(tp=tp, replicas=rollout.world_size),
            sync.bucket_megabytes * 2**20,
            ELEMENT_BYTES[config.rollout.dtype],
            routes.placement(),
        )
        address = actor.host_sync()[0]._replace(timeout_s=sync.timeout_s) if routes.need_meeting() else None
        given = (routes, address, config.rollout.dtype)
        parts = ((actor, sender_parts(plan, actor.world_size)), (rollout, replica_parts(plan)))
        wait_all([group.submit("connect_sync", PerRank(own), *given) for group, own in parts])
        options = SyncOptions(sync.verify_freq, config.rollout.free_cache_engine, tp, sync.timeout_s)
        return ShardingManager(plan, GroupSource(actor, plan.rollout.world_size), GroupTarget(rollout), options)

    def _group(
        self,
        role: str,
        worker: str,
        kwargs: dict[str, Any],
        layout: ParallelLayout,
        budgets: dict[str, MicroBatchBudget] | None = None,
    ) -> WorkerGroup:
        return WorkerGroup(role, worker, kwargs, layout, self.pool, budgets=budgets)

    def _settings(
        self, model_path: str, megatron: MegatronConfig, optim: OptimConfig | None, phase: str | None
    ) -> RoleSettings:
        updates = run_updates(self.config, self.batches, phase, self.total_steps) if phase else 0
        return RoleSettings(
            model_path=model_path,
            layout=layout_of(megatron),
            megatron=megatron,
            optim=optim,
            total_updates=updates,
            device=self.config.trainer.device,
            seed=self.config.trainer.seed,
            external_lib=self.policy.model.own_modules,
        )

    def _update_plan(self, phase: str, loss_agg_mode: str, horizon: int | None = None) -> UpdatePlan:
        horizon = horizon or self.config.data.max_response_length
        return update_plan(self.batches.phase(phase), self._cost(phase), loss_agg_mode, horizon)

    def _log_prob(self, phase: str) -> LogProbSettings:
        micro = budget(self.batches.phase(phase).micro, self._cost(phase))
        return LogProbSettings(micro, self.policy.rollout.temperature)

    def _cost(self, phase: str) -> SequenceCost:
        """What a sequence costs the model of a phase."""
        if phase == "critic":
            return sequence_cost(read_model_config(str(self.config.critic.model.path)), value_head=True)
        return sequence_cost(read_model_config(self.policy.model.path))
