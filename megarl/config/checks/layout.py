"""Checks of devices: parallel layouts of the roles, engine replicas, and the transport of the weight sync."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megarl.config.checks.transformer_fields import override_problems
from megarl.config.problems import Problem
from megarl.config.schema.devices import OwnDevicesConfig
from megarl.config.schema.jobs import (
    CRITIC,
    REFERENCE,
    REWARD_MODEL,
    ROLLOUT,
    TEACHERS,
    EvaluateConfig,
    GenerateConfig,
    ScoredJobConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.schema.model import REPLICA_SIZES, MegatronConfig
from megarl.config.schema.rollout import RolloutConfig, TrainingRolloutConfig
from megarl.config.schema.run import RunConfig

_KeyProblems = Iterator[tuple[str, str]]


def train_layouts(config: TrainConfig) -> Iterator[Problem]:
    """Check the layouts of all roles that the job has."""
    policy, trainer, teachers = config.actor_rollout_ref, config.trainer, config.distillation
    yield from _layout(policy.actor.megatron, _trainers(trainer), "actor_rollout_ref.actor.megatron")
    if config.uses_reference and policy.ref.megatron is not None:
        yield from _layout(policy.ref.megatron, _pool(policy.ref, REFERENCE, trainer), f"{REFERENCE}.megatron")
    if local := teachers.local_teachers:
        pool = _pool(teachers, TEACHERS, trainer)
        for name, teacher in local.items():
            yield from _layout(teacher.megatron, pool, f"{TEACHERS}.teacher_models.{name}.megatron")
    if config.uses_critic:
        yield from _layout(config.critic.megatron, _pool(config.critic, CRITIC, trainer), "critic.megatron")


def unused_devices(config: TrainConfig) -> Iterator[Problem]:
    """Check that only roles with processes of their own have devices of their own."""
    policy, lacks = config.actor_rollout_ref, ""
    if policy.ref.nnodes:
        if not config.uses_reference:
            lacks = "this run has no reference policy; set 0"
        elif policy.model.lora_rank:
            lacks = f"with adapters (lora_rank={policy.model.lora_rank}) the reference is the actor's model; set 0"
        elif policy.ref.megatron is None:
            lacks = (
                "the reference's weights are swapped into the actor's model; set 0, or give the reference workers by a "
                f"layout, such as {REFERENCE}.megatron.tensor_model_parallel_size"
            )
        if lacks:
            yield Problem(f"{REFERENCE}.nnodes", policy.ref.nnodes, lacks)
    if config.critic.nnodes and not config.uses_critic:
        text = f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic; set 0"
        yield Problem(f"{CRITIC}.nnodes", config.critic.nnodes, text)
    if config.distillation.nnodes and not config.distillation.enabled:
        yield Problem(f"{TEACHERS}.nnodes", config.distillation.nnodes, f"{TEACHERS}.enabled is false; set 0")
    elif config.distillation.nnodes and not config.distillation.local_teachers:
        yield Problem(f"{TEACHERS}.nnodes", config.distillation.nnodes, "all teachers are servers (server.urls); set 0")


def supervised_layout(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the layout of a supervised job."""
    yield from _layout(config.megatron, _trainers(config.trainer), "megatron")


def reward_model_layout(config: ScoredJobConfig, trainer: RunConfig) -> Iterator[Problem]:
    """Check the devices and the layout of the reward model."""
    keys = config.reward_model
    if keys.enable:
        yield from _layout(keys.megatron, _pool(keys, REWARD_MODEL, trainer), f"{REWARD_MODEL}.megatron")
    elif keys.nnodes:
        yield Problem(f"{REWARD_MODEL}.nnodes", keys.nnodes, f"{REWARD_MODEL}.enable is false; set 0")


def replicas(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    """Check the number and the size of the engine replicas."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    sglang = rollout.engine_kwargs.sglang
    if rollout.server_urls and sglang.api_key_env is None:
        text = "name the environment variable with the API key that the servers of urls demand (--api-key)"
        yield Problem(f"{ROLLOUT}.engine_kwargs.sglang.api_key_env", sglang.api_key_env, text)
    tp, size = rollout.tensor_model_parallel_size, rollout.devices_per_replica
    pool = _pool(rollout if isinstance(rollout, TrainingRolloutConfig) else None, ROLLOUT, trainer)
    servers = len(rollout.server_urls)
    if rollout.replicas is None:
        text = f"replicas of {tp} devices do not divide {pool.text}"
        yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", tp, text)
    elif servers and servers != rollout.replicas:
        text = f"{ROLLOUT}.engine_kwargs.sglang.urls has {servers}, one per replica"
        yield Problem(f"{ROLLOUT}.replicas", rollout.replicas, text)
    elif rollout.replicas * size > pool.devices:
        total = f"{rollout.replicas} replicas x {size} = {rollout.replicas * size} devices"
        yield Problem(f"{ROLLOUT}.replicas", rollout.replicas, f"{total} are more than {pool.text}")
    elif tp > 1 and rollout.name == "embedded":
        text = f"{ROLLOUT}.name=embedded runs each replica on one device; set 1"
        yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", tp, text)
    elif (split := _nodes_of_replicas(rollout, trainer)) and split[1] % size:
        if size % split[1]:
            text = f"must divide {split[0]}={split[1]}, or be a multiple of it, for replicas on whole nodes"
            yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", tp, text)
        elif sglang.mode != "in_process":
            text = f"a server is on one node, and {size} devices are on {size // split[1]}; set in_process"
            yield Problem(f"{ROLLOUT}.engine_kwargs.sglang.mode", sglang.mode, text)


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
        per_node = f"{ROLLOUT}.n_gpus_per_node", rollout.n_gpus_per_node or 1
        return per_node if rollout.nnodes > 1 else None
    return ("trainer.n_gpus_per_node", trainer.n_gpus_per_node) if trainer.nnodes > 1 else None


class _Pool(NamedTuple):
    """Number of devices of a role, and its description with the keys."""

    devices: int
    text: str


def _pool(keys: OwnDevicesConfig | None, path: str, trainer: RunConfig) -> _Pool:
    """The devices of a role: its own, or the trainer's."""
    return _keyed_pool(path, keys.nnodes, keys.n_gpus_per_node or 1) if keys and keys.nnodes else _trainers(trainer)


def _trainers(trainer: RunConfig) -> _Pool:
    return _keyed_pool("trainer", trainer.nnodes, trainer.n_gpus_per_node)


def _keyed_pool(path: str, nodes: int, per_node: int) -> _Pool:
    devices = nodes * per_node
    return _Pool(devices, f"the pool of {devices} ({path}.nnodes={nodes} x {path}.n_gpus_per_node={per_node})")


def _layout(megatron: MegatronConfig, pool: _Pool, path: str) -> Iterator[Problem]:
    """Check the layout of one role, as far as possible without its model; ``path`` is the key of its section."""
    for key, text in (*_devices(megatron, pool), *_pipeline(megatron), *_memory(megatron)):
        yield Problem(f"{path}.{key}", getattr(megatron, key), text)
    trains = not path.endswith(".ref.megatron")  # which has the actor's fields
    problems = dict(override_problems(megatron.override_transformer_config, trains=trains))
    if megatron.override_transformer_config.get("overlap_p2p_comm") is True and not _is_interleaved(megatron):
        problems["overlap_p2p_comm"] = "needs virtual_pipeline_model_parallel_size of at least 2"
    for name, text in problems.items():
        value = megatron.override_transformer_config[name]
        yield Problem(f"{path}.override_transformer_config.{name}", value, text)


def _is_interleaved(megatron: MegatronConfig) -> bool:
    return (megatron.virtual_pipeline_model_parallel_size or 1) > 1


def _devices(megatron: MegatronConfig, pool: _Pool) -> _KeyProblems:
    sizes = {key: getattr(megatron, key) for key in REPLICA_SIZES}
    used = {key: size for key, size in sizes.items() if size > 1 or key != "context_parallel_size"}
    product = " x ".join(f"{REPLICA_SIZES[key]} parallel {size}" for key, size in used.items())
    replica, dp = megatron.devices_per_replica, megatron.data_parallel_size
    if dp is None:
        key, right = _divide(sizes, pool.devices)
        text = f"{product} = {replica} devices per replica do not divide {pool.text}"
        yield key, f"{text}; valid with the other sizes: {right}" if right else text
    elif replica * dp > pool.devices:
        most = pool.devices // replica
        text = f"{product} x data parallel {dp} = {replica * dp} devices are more than {pool.text}"
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
