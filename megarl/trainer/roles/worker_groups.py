"""The scoring reward model, and micro-batch budgets, which several jobs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megarl.cluster.calls import wait_all
from megarl.cluster.resources import PlacedPool
from megarl.cluster.role_groups import MegatronGroup, RewardModelGroup
from megarl.cluster.worker_group import wait_ready
from megarl.config.batch import MicroBatches, PhasePlan, reward_micro_batches
from megarl.config.schema.jobs import EvaluateConfig, TrainConfig
from megarl.models import read_model_config
from megarl.models.sequence_cost import SequenceCost, sequence_cost
from megarl.workers.settings import MicroBatchBudget, RoleSettings, UpdatePlan, layout_of

Progress = Callable[[int, int], None]
"""Shows the number of workers that are built, and of all."""


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
    settings = RoleSettings(
        model_path=path,
        layout=layout_of(keys.megatron),
        megatron=keys.megatron,
        optim=None,
        total_updates=0,
        device=pool.pool.device,
        seed=config.trainer.seed,
        nccl_timeout=config.trainer.nccl_timeout,
        external_lib=config.actor_rollout_ref.model.user_modules,
        repeat_out_of_memory=config.trainer.repeat_out_of_memory,
        has_own_devices=keys.nnodes > 0,
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
