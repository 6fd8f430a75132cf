"""Worker groups of a training job, and what several jobs share: settings, micro-batch budgets, the reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megarl.cluster.calls import wait_all
from megarl.cluster.resources import PlacedPool
from megarl.cluster.role_groups import (
    ActorGroup,
    CriticGroup,
    MegatronGroup,
    ReferenceGroup,
    RewardModelGroup,
    RolloutGroup,
    TeacherGroup,
)
from megarl.cluster.worker_group import wait_ready
from megarl.config import AdapterKeys, MegatronConfig, OptimConfig
from megarl.config.batch import MicroBatches, PhasePlan, reward_micro_batches
from megarl.config.schema.jobs import EvaluateConfig, TrainConfig
from megarl.config.schema.run import EvaluateRunConfig, TrainingRunConfig
from megarl.models import read_model_config
from megarl.models.sequence_cost import SequenceCost, sequence_cost
from megarl.samples.replicas import Replicas
from megarl.workers.settings import MicroBatchBudget, RoleSettings, UpdatePlan, layout_of, lora_options

Progress = Callable[[int, int], None]
"""Shows the number of workers that are built, and of all."""


@dataclass
class Roles:
    """Worker groups of a training job; a role that the algorithm does not need is None.

    Attributes:
        reference: computes log-probs and representations; the actor's group if the actor holds the reference's weights.
        teachers: grade tokens in distillation, by the value that selects them; empty without distillation.
        replicas: rollout replicas, which get the actor's weights.
    """

    actor: ActorGroup
    critic: CriticGroup | None
    reference: ReferenceGroup | None
    reward_model: RewardModelGroup | None
    teachers: dict[str, TeacherGroup]
    replicas: Replicas

    def describe(self) -> str:
        """Describe each group, one line each: layout and kernels of Megatron workers, and the rollout engine."""
        groups: dict[str, MegatronGroup | RolloutGroup] = {**self._trainers(), "rollout": self.replicas.group}
        return "\n".join(f"{name}: {group.describe()}" for name, group in groups.items())

    def _trainers(self) -> dict[str, MegatronGroup]:
        """Groups of Megatron workers by name; a group that is both actor and reference counts once."""
        groups: dict[str, MegatronGroup | None] = {"actor": self.actor, "critic": self.critic, **self._frozen()}
        return {name: group for name, group in groups.items() if group}

    def _frozen(self) -> dict[str, MegatronGroup | None]:
        reference = None if self.reference is self.actor else self.reference
        teachers = {teacher.role: teacher for teacher in self.teachers.values()}
        return {"reference": reference, "reward_model": self.reward_model, **teachers}

    def frozen(self) -> list[MegatronGroup]:
        """Return the groups of Megatron workers that do not train."""
        return [group for group in self._frozen().values() if group]

    def learners(self) -> Iterator[ActorGroup | CriticGroup]:
        """Yield the groups that train, whose state a checkpoint holds."""
        yield self.actor
        if self.critic:
            yield self.critic


def budget(micro: MicroBatches, cost: SequenceCost) -> MicroBatchBudget:
    """Build a worker's micro-batch budget from the batch plan and the cost of a sequence."""
    return MicroBatchBudget(micro.max_tokens, micro.samples, micro.multiple, cost, micro.share_prompts)


def update_plan(phase: PhasePlan, cost: SequenceCost, loss_agg_mode: str, horizon: int) -> UpdatePlan:
    """Build a worker's plan of an update from the batch plan and the cost of a sequence."""
    return UpdatePlan(
        mini_batch_rows=phase.samples_per_mini_batch,
        epochs=phase.epochs,
        budget=budget(phase.micro, cost),
        loss_agg_mode=loss_agg_mode,
        horizon=horizon,
    )


def role_settings(
    run: TrainingRunConfig | EvaluateRunConfig,
    device: str,
    modules: tuple[str, ...],
    model_path: str,
    megatron: MegatronConfig,
    optim: OptimConfig | None = None,
    updates: int = 0,
    adapters: AdapterKeys | None = None,
    has_own_devices: bool = False,
    export_files: Mapping[str, str] = MappingProxyType({}),
    image_options: Mapping[str, Any] = MappingProxyType({}),
) -> RoleSettings:
    """Build a Megatron worker's settings; see :class:`~megarl.workers.settings.RoleSettings`."""
    return RoleSettings(
        model_path=model_path,
        layout=layout_of(megatron),
        megatron=megatron,
        optim=optim,
        total_updates=updates,
        device=device,
        seed=run.seed,
        nccl_timeout=run.nccl_timeout,
        external_lib=modules,
        repeat_out_of_memory=run.repeat_out_of_memory,
        lora=lora_options(adapters, run.seed) if adapters else None,
        adapter_path=adapters.lora_adapter_path if adapters else None,
        reference_adapter=adapters is not None and adapters.lora.reference == "adapter",
        trained_tower=adapters is not None and adapters.trains_tower,
        has_own_devices=has_own_devices,
        export_files=export_files,
        image_options=dict(image_options),
    )


def pending_device_bytes(pool: PlacedPool, groups: Iterable[MegatronGroup]) -> int | None:
    """Return the maximum device bytes that roles on the replicas' devices will allocate; None without such roles.

    A device holds one process of each role.

    Args:
        pool: devices of the replicas.
        groups: all roles that train or compute with Megatron.
    """
    neighbours = [group for group in groups if group.pool is pool]
    by_group: list[list[int]] = wait_all([group.submit("pending_device_bytes") for group in neighbours])
    return sum(map(max, by_group)) if neighbours else None


def reward_model_group(config: TrainConfig | EvaluateConfig, pool: PlacedPool) -> RewardModelGroup:
    """Start the processes of the reward model; the verb ``init_model`` builds the model."""
    keys, path = config.reward.model, str(config.reward.model.path)
    modules = config.actor_rollout_ref.model.user_modules
    settings = role_settings(
        config.trainer,
        pool.pool.device,
        modules,
        path,
        keys.megatron,
        has_own_devices=keys.nnodes > 0,
        image_options=config.data.mm_processor_kwargs,
    )
    micro = budget(reward_micro_batches(config), sequence_cost(read_model_config(path), value_head=True))
    worker, kwargs = "megarl.workers.reward_model:RewardModelWorker", {"settings": settings, "budget": micro}
    return RewardModelGroup("reward_model", worker, kwargs, settings.layout, pool, budgets={"compute_rm_score": micro})


def ready_reward_model(config: TrainConfig | EvaluateConfig, pool: PlacedPool, progress: Progress) -> RewardModelGroup:
    """Start the reward model alone, and wait until it is ready to score.

    Raises:
        WorkerError: a process failed.
    """
    workers = reward_model_group(config, pool)
    wait_ready([workers], progress=progress)
    workers.init_model()
    return workers
