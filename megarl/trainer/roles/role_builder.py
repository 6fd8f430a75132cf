"""Builds a training job's worker groups and their weight sync from the configuration."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.algorithms import Truncation
from megarl.base.formatting import DTYPE_BYTES
from megarl.cluster.calls import PerRank, wait_all
from megarl.cluster.role_groups import (
    ActorGroup,
    CriticGroup,
    ReferenceGroup,
    RolloutGroup,
    TeacherGroup,
)
from megarl.cluster.sharding_manager import ShardingManager, SyncOptions
from megarl.cluster.worker_group import wait_ready
from megarl.config import AdapterKeys, MegatronConfig, OptimConfig, TrainConfig
from megarl.config.batch import BatchPlan, teacher_phase
from megarl.config.schema.algorithm import COLOCATED, DISAGGREGATED, weight_bounds
from megarl.config.schema.distillation import TeacherServerConfig
from megarl.config.schema.jobs import ACTOR, CRITIC, REFERENCE, REWARD_MODEL, ROLLOUT, TEACHERS, SupervisedConfig
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.sequence_cost import SequenceCost, sequence_cost
from megarl.rollout.registry import engine_vocab_multiple
from megarl.samples.replicas import ColocatedReplicas, DisaggregatedReplicas, HybridReplicas, Replicas
from megarl.samples.rollout_group import REPLICAS_FILE, ElasticReplicas, build_engines, rollout_group
from megarl.sharding.placement import RolloutLayout, Routes
from megarl.sharding.plan import build_plan, replica_plans, sender_plans
from megarl.trainer.roles.devices import JobPools
from megarl.trainer.roles.worker_groups import (
    Progress,
    Roles,
    budget,
    pending_device_bytes,
    reward_model_group,
    role_settings,
    update_plan,
)
from megarl.workers.settings import (
    LogProbSettings,
    RoleSettings,
    UpdatePlan,
    hidden_forms,
    layout_of,
    teacher_heads,
)

logger = logging.getLogger(__name__)

REFERENCE_VERBS = ("compute_ref_log_prob", "compute_ref_representations")
"""Verbs of the reference, which share one token budget."""


def run_updates(config: TrainConfig | SupervisedConfig, batches: BatchPlan, phase: str, total_steps: int) -> int:
    """Count the optimizer steps of a role in the whole run, at least those of one training step.

    Args:
        phase: update of the role: ``actor``, ``critic``, or the role of a supervised job.
    """
    # During the critic's warm-up the actor is not updated.
    skipped = config.trainer.critic_warmup if phase == "actor" and isinstance(config, TrainConfig) else 0
    return batches.phase(phase).optimizer_steps * max(1, total_steps - skipped)


@dataclass(eq=False)
class RoleBuilder:
    """Builds the worker groups of a training job.

    Args:
        eos_token_ids: tokens that end every sequence; None = those of the model folder and its tokenizer.
    """

    config: TrainConfig
    batches: BatchPlan
    total_steps: int
    pools: JobPools
    folder: Path = Path()
    notify: Callable[[str], None] = logger.info
    progress: Progress | None = None
    eos_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.policy = self.config.actor_rollout_ref

    def build(self) -> Roles:
        """Start all groups in parallel, build their models, and connect the weight sync.

        The engines are built last: on shared GPUs SGLang sizes its KV cache by the memory that the other roles leave.
        They sleep until the first sync, since a resumed job first loads its checkpoint.

        Raises:
            WorkerError: a process failed; names role and rank.
        """
        pool, hybrid = self.pools.of(ROLLOUT), self.config.hybrid_replicas
        if hybrid:
            pool = pool.joined(self.pools.trainer)
        actor, rollout = self._actor(), rollout_group(self.config, pool, hybrid, self.eos_token_ids)
        critic = self._critic() if self.config.uses_critic and not self.config.trainer.val_only else None
        reference_group = self._reference() if self._reference_has_workers() else None
        reward_model = None
        if self.config.reward.model.enable:
            reward_model = reward_model_group(self.config, self.pools.of(REWARD_MODEL))
        teachers = {} if self.config.trainer.val_only else self._teachers()
        groups = [group for group in (actor, critic, reference_group, reward_model, *teachers.values()) if group]
        wait_ready([*groups, rollout], progress=self.progress)
        wait_all([group.submit("init_model") for group in groups])
        hybrid_ranks = range(rollout.world_size - hybrid, rollout.world_size)

        def pending() -> dict[int, int | None]:
            shared, alone = (
                pending_device_bytes(self.pools.trainer, groups),
                pending_device_bytes(self.pools.of(ROLLOUT), groups),
            )
            return {rank: shared if rank in hybrid_ranks else alone for rank in range(rollout.world_size)}

        build_engines(rollout, rollout.ranks, pending())
        reference = reference_group or (actor if self._has_reference() else None)
        connect = partial(self._connect, actor, rollout, hybrid_ranks if hybrid else None)
        replicas = self._replicas(rollout, connect, pending, hybrid_ranks)
        replicas.free()
        return Roles(actor, critic, reference, reward_model, teachers, replicas)

    def _replicas(
        self,
        group: RolloutGroup,
        connect: Callable[[Sequence[int]], ShardingManager],
        pending: Callable[[], dict[int, int | None]],
        hybrid_ranks: Sequence[int],
    ) -> Replicas:
        """Select the replica class by the training mode."""
        mode, keys, elastic, hybrid = self.config.async_training.mode, self.policy.rollout, None, None
        if mode != DISAGGREGATED:
            return (ColocatedReplicas if mode == COLOCATED else Replicas)(group, connect, pending)
        if hybrid_ranks:
            hybrid = HybridReplicas(hybrid_ranks, group.world_size - len(hybrid_ranks))
        if keys.min_replicas is not None:
            request, timeout_s = self.folder / REPLICAS_FILE, keys.health.join_timeout_s
            elastic = ElasticReplicas(group, keys.min_replicas, timeout_s, request, self.notify)
        return DisaggregatedReplicas(group, connect, pending, elastic, hybrid)

    def _actor(self) -> ActorGroup:
        reference = None
        if self._has_reference() and not self._reference_has_workers():
            reference = replace(self._log_prob("ref_log_prob"), full_kl=self.config.algorithm.uses_full_kl)
        actor = self.policy.actor
        settings = self._settings(self.policy.model.path, actor.megatron, actor.optim, "actor", self.policy.model)
        kwargs: dict[str, Any] = {
            "settings": replace(
                settings, trained_tower=self.policy.trains_tower, vision_lr_factor=actor.vision_lr_factor
            ),
            "config": actor,
            "plan": self._update_plan("actor", str(actor.loss_agg_mode), actor.loss_scale_factor),
            "log_prob": replace(self._log_prob("old_log_prob"), sum_pi_squared=self.config.uses_sum_pi_squared),
            "reference": reference,
            "correction": self._proximal_bounds(),
            "distillation": self.config.distillation.distillation_loss if self.config.distillation.enabled else None,
            "teacher_heads": teacher_heads(self.config.distillation),
        }
        budgets = {"compute_log_prob": kwargs["log_prob"].budget, "update_actor": kwargs["plan"].budget}
        if reference is not None:
            budgets |= dict.fromkeys(REFERENCE_VERBS, reference.budget)
        worker, layout = "megarl.workers.actor:ActorWorker", layout_of(actor.megatron)
        return ActorGroup("actor", worker, kwargs, layout, self.pools.of(ACTOR), budgets=budgets)

    def _proximal_bounds(self) -> Truncation | None:
        """Bounds of the importance weights that the actor computes with the loss."""
        if not self.config.estimates_proximal_policy:
            return None
        bounds = weight_bounds(self.config.algorithm.rollout_correction)
        return Truncation(bounds.upper, bounds.lower)

    def _critic(self) -> CriticGroup:
        critic = self.config.critic
        kwargs: dict[str, Any] = {
            "settings": self._settings(
                str(critic.model.path), critic.megatron, critic.optim, "critic", critic.model, critic.nnodes > 0
            ),
            "config": critic,
            "plan": self._update_plan("critic", str(critic.loss_agg_mode)),
        }
        budgets = dict.fromkeys(("compute_values", "update_critic"), kwargs["plan"].budget)
        worker, layout = "megarl.workers.critic:CriticWorker", layout_of(critic.megatron)
        return CriticGroup("critic", worker, kwargs, layout, self.pools.of(CRITIC), budgets=budgets)

    def _reference(self) -> ReferenceGroup:
        megatron = self.policy.ref.megatron
        assert megatron is not None
        kwargs: dict[str, Any] = {
            "settings": self._settings(
                self.policy.model.path, megatron, None, None, has_own_devices=self.policy.ref.nnodes > 0
            ),
            "log_prob": self._log_prob("ref_log_prob"),
        }
        budgets = dict.fromkeys(REFERENCE_VERBS, kwargs["log_prob"].budget)
        worker, layout = "megarl.workers.frozen:ReferenceWorker", layout_of(megatron)
        return ReferenceGroup("reference", worker, kwargs, layout, self.pools.of(REFERENCE), budgets=budgets)

    def _teachers(self) -> dict[str, TeacherGroup]:
        """One worker group per teacher, by the value that selects it."""
        distillation = self.config.distillation
        names = distillation.teachers_by_key if distillation.enabled else {}
        return {key: self._teacher(name) for key, name in names.items()}

    def _teacher(self, name: str) -> TeacherGroup:
        teacher = self.config.distillation.teacher_models[name]
        if teacher.server.urls:
            return self._served_teacher(name, teacher.server)
        cost = sequence_cost(read_model_config(str(teacher.model_path)))
        micro = budget(self.batches.phase(teacher_phase(name)).micro, cost)
        alone = self.config.distillation.teacher_is_alone
        kwargs: dict[str, Any] = {
            "settings": self._settings(str(teacher.model_path), teacher.megatron, None, None, has_own_devices=alone),
            "log_prob": LogProbSettings(micro, self.policy.rollout.temperature),
            "topk": self.config.distillation.distillation_loss.teacher_topk,
            "candidates": read_model_config(self.policy.model.path).vocab_size,
            "hidden": hidden_forms(self.config.distillation).get(name),
        }
        worker, layout = "megarl.workers.frozen:TeacherWorker", layout_of(teacher.megatron)
        role, budgets = teacher_phase(name), {"compute_teacher_log_prob": micro}
        return TeacherGroup(role, worker, kwargs, layout, self.pools.of(TEACHERS), budgets=budgets)

    def _served_teacher(self, name: str, server: TeacherServerConfig) -> TeacherGroup:
        """One process on the driver's node that asks the servers."""
        kwargs: dict[str, Any] = {
            "name": name,
            "server": server,
            "topk": self.config.distillation.distillation_loss.teacher_topk,
            "candidates": read_model_config(self.policy.model.path).vocab_size,
        }
        worker, layout = "megarl.workers.served_teacher:ServedTeacherWorker", ParallelLayout()
        return TeacherGroup(teacher_phase(name), worker, kwargs, layout, self.pools.trainer, on_device=False)

    def _has_reference(self) -> bool:
        return self.config.uses_reference and not self.config.trainer.val_only

    def _reference_has_workers(self) -> bool:
        return self._has_reference() and self.policy.ref.megatron is not None

    def _connect(
        self, actor: ActorGroup, rollout: RolloutGroup, hybrid: Collection[int] | None, members: Sequence[int]
    ) -> ShardingManager:
        """Plan the weight sync from the actor to these ranks of the rollout group, and connect both sides."""
        sync, config, tp = self.config.sync, self.policy, self.policy.rollout.tensor_model_parallel_size
        train, engines = wait_all([actor.submit("sync_place"), rollout.submit_on(members, "sync_places")])
        routes = Routes(tuple(train), tuple(itertools.chain(*engines)), sync.transport)
        plan = build_plan(
            WeightMap(read_model_config(config.model.path).with_trained_tower(config.trains_tower)),
            actor.layout,
            RolloutLayout(tp=tp, replicas=len(members), vocab_multiple=engine_vocab_multiple(config.rollout.name)),
            sync.bucket_megabytes * 2**20,
            DTYPE_BYTES[config.rollout.dtype],
            routes.placement(),
            self.config.async_training.sync_wave_size,
            together=config.rollout.quantization is not None,
        )
        address = actor.host_sync()[0] if routes.needs_rendezvous() else None
        if address is not None:
            address = address._replace(timeout_s=sync.timeout_s)
        shared = (routes, address, config.rollout.dtype)
        parts = PerRank(dict(zip(members, replica_plans(plan), strict=True)))
        ends = (
            actor.submit("connect_sync", PerRank(sender_plans(plan, actor.world_size)), *shared),
            rollout.submit_on(members, "connect_sync", parts, *shared),
        )
        wait_all(ends)
        options = SyncOptions(
            verify_freq=sync.verify_freq,
            free_engine=config.rollout.free_cache_engine or hybrid is not None,
            sleepers=hybrid,
            timeout_s=sync.timeout_s,
            answer_s=config.rollout.health.timeout_s,
        )
        return ShardingManager(plan, actor, rollout, options, members)

    def _settings(
        self,
        model_path: str,
        megatron: MegatronConfig,
        optim: OptimConfig | None,
        phase: str | None,
        adapters: AdapterKeys | None = None,
        has_own_devices: bool = False,
    ) -> RoleSettings:
        updates = run_updates(self.config, self.batches, phase, self.total_steps) if phase else 0
        device, modules = self.pools.trainer.pool.device, self.policy.model.user_modules
        return role_settings(
            self.config.trainer, device, modules, model_path, megatron, optim, updates, adapters, has_own_devices,
            image_options=self.config.data.mm_processor_kwargs,
        )  # fmt: skip

    def _update_plan(self, phase: str, loss_agg_mode: str, horizon: int | None = None) -> UpdatePlan:
        horizon = horizon or self.config.data.max_response_length
        return update_plan(self.batches.phase(phase), self._cost(phase), loss_agg_mode, horizon)

    def _log_prob(self, phase: str) -> LogProbSettings:
        micro = budget(self.batches.phase(phase).micro, self._cost(phase))
        return LogProbSettings(micro, self.policy.rollout.temperature)

    def _cost(self, phase: str) -> SequenceCost:
        if phase == "critic":
            return sequence_cost(read_model_config(str(self.config.critic.model.path)), value_head=True)
        return sequence_cost(read_model_config(self.policy.model.path))
