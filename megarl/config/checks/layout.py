"""Checks of devices: parallel layouts of the roles, engine replicas, and the transport of the weight sync."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.config.checks.transformer_fields import override_problems
from megarl.config.problems import Problem
from megarl.config.schema.jobs import EvaluateConfig, GenerateConfig, ScoredJobConfig, SupervisedConfig, TrainConfig
from megarl.config.schema.model import REPLICA_SIZES, MegatronConfig
from megarl.config.schema.rollout import RolloutConfig, TrainingRolloutConfig
from megarl.config.schema.run import RunConfig

_ROLLOUT = "actor_rollout_ref.rollout"
_KeyProblems = Iterator[tuple[str, str]]


def train_layouts(config: TrainConfig) -> Iterator[Problem]:
    """Check the layouts of all roles that the job has."""
    policy = config.actor_rollout_ref
    yield from _layout(policy.actor.megatron, config.trainer, "actor_rollout_ref.actor.megatron")
    if config.uses_reference and policy.ref.megatron is not None:
        yield from _layout(policy.ref.megatron, config.trainer, "actor_rollout_ref.ref.megatron")
    if config.distillation.enabled:
        for name, teacher in config.distillation.teacher_models.items():
            yield from _layout(teacher.megatron, config.trainer, f"distillation.teacher_models.{name}.megatron")
    if config.uses_critic:
        yield from _layout(config.critic.megatron, config.trainer, "critic.megatron")


def supervised_layout(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the layout of a supervised job."""
    yield from _layout(config.megatron, config.trainer, "megatron")


def reward_model_layout(config: ScoredJobConfig, trainer: RunConfig) -> Iterator[Problem]:
    """Check the layout of the reward model."""
    if config.reward_model.enable:
        yield from _layout(config.reward_model.megatron, trainer, "reward_model.megatron")


def replicas(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    """Check the number and the size of the engine replicas."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    sglang = rollout.engine_kwargs.sglang
    if rollout.server_urls and sglang.api_key_env is None:
        text = "name the environment variable with the API key that the servers of urls demand (--api-key)"
        yield Problem(f"{_ROLLOUT}.engine_kwargs.sglang.api_key_env", sglang.api_key_env, text)
    tp, size, pool = rollout.tensor_model_parallel_size, rollout.devices_per_replica, _engine_pool(rollout, trainer)
    servers = len(rollout.server_urls)
    if rollout.replicas is None:
        text = f"replicas of {tp} devices do not divide {pool}"
        yield Problem(f"{_ROLLOUT}.tensor_model_parallel_size", tp, text)
    elif servers and servers != rollout.replicas:
        text = f"{_ROLLOUT}.engine_kwargs.sglang.urls has {servers}, one per replica"
        yield Problem(f"{_ROLLOUT}.replicas", rollout.replicas, text)
    elif rollout.replicas * size > (rollout.own_devices or trainer.num_devices):
        total = f"{rollout.replicas} replicas x {size} = {rollout.replicas * size} devices"
        yield Problem(f"{_ROLLOUT}.replicas", rollout.replicas, f"{total} are more than {pool}")
    elif tp > 1 and rollout.name == "embedded":
        text = f"{_ROLLOUT}.name=embedded runs each replica on one device; set 1"
        yield Problem(f"{_ROLLOUT}.tensor_model_parallel_size", tp, text)
    elif (split := _nodes_of_replicas(rollout, trainer)) and split[1] % size:
        text = (
            f"must divide {split[0]}={split[1]}: a replica that the run starts does not span nodes; a server "
            f"that you start can, see {_ROLLOUT}.engine_kwargs.sglang.urls"
        )
        yield Problem(f"{_ROLLOUT}.tensor_model_parallel_size", tp, text)


def weight_sync(config: TrainConfig) -> Iterator[Problem]:
    """Check that the transport of the weight sync fits devices and nodes."""
    sync, trainer = config.sync, config.trainer
    if trainer.device == "cpu" and sync.transport in ("cuda_ipc", "nccl"):
        yield Problem("sync.transport", sync.transport, "moves GPU memory and trainer.device is cpu; set auto")
    if trainer.nnodes > 1 and sync.transport in ("shared_memory", "cuda_ipc"):
        text = f"does not lead from one node to another and trainer.nnodes={trainer.nnodes}; set auto"
        yield Problem("sync.transport", sync.transport, text)


def _nodes_of_replicas(rollout: RolloutConfig, trainer: RunConfig) -> tuple[str, int] | None:
    """Key and value of the devices per node for engines on several nodes; None on one node."""
    if isinstance(rollout, TrainingRolloutConfig) and rollout.own_devices:
        per_node = f"{_ROLLOUT}.n_gpus_per_node", rollout.n_gpus_per_node or 1
        return per_node if rollout.nnodes > 1 else None
    return ("trainer.n_gpus_per_node", trainer.n_gpus_per_node) if trainer.nnodes > 1 else None


def _engine_pool(rollout: RolloutConfig, trainer: RunConfig) -> str:
    if not isinstance(rollout, TrainingRolloutConfig) or not rollout.nnodes:
        return _pool(trainer)
    sizes = f"{_ROLLOUT}.nnodes={rollout.nnodes} x {_ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node}"
    return f"the engines' pool of {rollout.own_devices} ({sizes})"


def _pool(trainer: RunConfig) -> str:
    return (
        f"the pool of {trainer.num_devices} "
        f"(trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node})"
    )


def _layout(megatron: MegatronConfig, trainer: RunConfig, path: str) -> Iterator[Problem]:
    """Check the layout of one role, as far as possible without its model; ``path`` is the key of its section."""
    for key, text in (*_devices(megatron, trainer), *_pipeline(megatron), *_memory(megatron)):
        yield Problem(f"{path}.{key}", getattr(megatron, key), text)
    problems = dict(override_problems(megatron.override_transformer_config))
    if megatron.override_transformer_config.get("overlap_p2p_comm") is True and not _is_interleaved(megatron):
        problems["overlap_p2p_comm"] = "needs virtual_pipeline_model_parallel_size of at least 2"
    for name, text in problems.items():
        value = megatron.override_transformer_config[name]
        yield Problem(f"{path}.override_transformer_config.{name}", value, text)


def _is_interleaved(megatron: MegatronConfig) -> bool:
    return (megatron.virtual_pipeline_model_parallel_size or 1) > 1


def _devices(megatron: MegatronConfig, trainer: RunConfig) -> _KeyProblems:
    sizes = {key: getattr(megatron, key) for key in REPLICA_SIZES}
    used = {key: size for key, size in sizes.items() if size > 1 or key != "context_parallel_size"}
    product = " x ".join(f"{REPLICA_SIZES[key]} parallel {size}" for key, size in used.items())
    replica, dp = megatron.devices_per_replica, megatron.data_parallel_size
    if dp is None:
        key, right = _divide(sizes, trainer.num_devices)
        text = f"{product} = {replica} devices per replica do not divide {_pool(trainer)}"
        yield key, f"{text}; valid with the other sizes: {right}" if right else text
    elif replica * dp > trainer.num_devices:
        most = trainer.num_devices // replica
        text = f"{product} x data parallel {dp} = {replica * dp} devices are more than {_pool(trainer)}"
        yield "data_parallel_size", f"{text}; set {most} at most" if most else text


def _divide(sizes: dict[str, int], devices: int) -> tuple[str, str]:
    """The first size that alone can be changed to divide the devices, and its valid values."""
    large = [key for key, size in sizes.items() if size > 1]
    for key in large:
        rest = math.prod(size for name, size in sizes.items() if name != key)
        right = [str(n) for n in range(1, devices + 1) if devices % (n * rest) == 0]
        if right:
            return key, ", ".join(right)
    return large[0], ""


def _pipeline(megatron: MegatronConfig) -> _KeyProblems:
    fixed = {
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage is not None,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage is not None,
    }
    counted = {
        "account_for_embedding_in_pipeline_split": megatron.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": megatron.account_for_loss_in_pipeline_split,
    }
    if megatron.pipeline_model_parallel_size == 1:
        if _is_interleaved(megatron):
            yield "virtual_pipeline_model_parallel_size", "needs pipeline_model_parallel_size of at least 2; set null"
        for keys, off in ((fixed, "null"), (counted, "false")):
            for key in (key for key, is_set in keys.items() if is_set):
                yield key, f"there is one stage only (pipeline_model_parallel_size=1); set {off}"
    elif any(fixed.values()):
        names = " and ".join(name for name, is_set in fixed.items() if is_set)
        for key in (key for key, is_set in counted.items() if is_set):
            yield key, f"{names} already sets the split of layers; set false, or set the latter null"


def _memory(megatron: MegatronConfig) -> _KeyProblems:
    if megatron.overlap_param_gather and not megatron.use_distributed_optimizer:
        yield "overlap_param_gather", "needs use_distributed_optimizer=true, which is false: nothing is gathered"
    full = megatron.recompute_granularity == "full"
    for key, value in (
        ("recompute_method", megatron.recompute_method),
        ("recompute_num_layers", megatron.recompute_num_layers),
    ):
        if value is not None and not full:
            yield key, "has no effect without recompute_granularity=full; set null"
    if megatron.recompute_granularity == "selective" and not megatron.recompute_modules:
        yield "recompute_modules", "recompute_granularity=selective needs at least one"
