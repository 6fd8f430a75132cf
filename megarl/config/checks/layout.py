"""Checks of devices: parallel layouts of the roles, engine replicas, and the transport of the weight sync."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megarl.config.checks.transformer_fields import override_problems
from megarl.config.derived import inheritance_note
from megarl.config.problems import Problem
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
from megarl.config.schema.model import REPLICA_SIZES, MegatronConfig, OwnDevicesConfig
from megarl.config.schema.rollout import RolloutConfig, TrainingRolloutConfig
from megarl.config.schema.run import RunConfig


def train_layouts(config: TrainConfig) -> Iterator[Problem]:
    """Check the layouts of all roles that the job has."""
    policy, trainer, teachers = config.actor_rollout_ref, config.trainer, config.distillation
    yield from _layout(policy.actor.megatron, _trainers(trainer), "actor_rollout_ref.actor.megatron")
    if config.uses_reference and policy.ref.megatron is not None:
        pool = _pool(policy.ref, REFERENCE, trainer)
        yield from _role_layout(config, policy.ref.megatron, pool, f"{REFERENCE}.megatron")
    if local := teachers.local_teachers:
        pool = _pool(teachers, TEACHERS, trainer)
        for name, teacher in local.items():
            yield from _role_layout(config, teacher.megatron, pool, f"{TEACHERS}.teacher_models.{name}.megatron")
    if config.uses_critic:
        pool = _pool(config.critic, CRITIC, trainer)
        yield from _role_layout(config, config.critic.megatron, pool, f"{CRITIC}.megatron")


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
            yield Problem(f"{REFERENCE}.nnodes", policy.ref.nnodes, lacks, code="layout.unused-devices")
    if config.critic.nnodes and not config.uses_critic:
        text = f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic; set 0"
        yield Problem(f"{CRITIC}.nnodes", config.critic.nnodes, text, code="layout.unused-devices")
    if config.distillation.nnodes and not config.distillation.enabled:
        text = f"{TEACHERS}.enabled is false; set 0"
        yield Problem(f"{TEACHERS}.nnodes", config.distillation.nnodes, text, code="layout.unused-devices")
    elif config.distillation.nnodes and not config.distillation.local_teachers:
        text = "all teachers are servers (server.urls); set 0"
        yield Problem(f"{TEACHERS}.nnodes", config.distillation.nnodes, text, code="layout.unused-devices")


def supervised_layout(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the layout of a supervised job."""
    yield from _layout(config.megatron, _trainers(config.trainer), "megatron")


def reward_model_layout(config: ScoredJobConfig, trainer: RunConfig) -> Iterator[Problem]:
    """Check the devices and the layout of the reward model."""
    keys = config.reward.model
    if keys.enable:
        yield from _role_layout(config, keys.megatron, _pool(keys, REWARD_MODEL, trainer), f"{REWARD_MODEL}.megatron")
    elif keys.nnodes:
        text = f"{REWARD_MODEL}.enable is false; set 0"
        yield Problem(f"{REWARD_MODEL}.nnodes", keys.nnodes, text, code="layout.unused-devices")


def replicas(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    """Check the number and the size of the engine replicas."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    sglang = rollout.engine_kwargs.sglang
    if rollout.server_urls and sglang.api_key_env is None:
        text = "name the environment variable with the API key that the servers of urls demand (--api-key)"
        yield Problem(f"{ROLLOUT}.engine_kwargs.sglang.api_key_env", None, text, code="sglang.no-api-key-env")
    tp, size = rollout.tensor_model_parallel_size, rollout.devices_per_replica
    pool = _pool(rollout if isinstance(rollout, TrainingRolloutConfig) else None, ROLLOUT, trainer)
    servers = len(rollout.server_urls)
    if rollout.replicas is None:
        text = f"replicas of {tp} devices do not divide {pool.text}"
        yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", tp, text, code="layout.replica-size")
    elif servers and servers != rollout.replicas:
        text = f"{ROLLOUT}.engine_kwargs.sglang.urls has {servers}, one per replica"
        yield Problem(f"{ROLLOUT}.replicas", rollout.replicas, text, code="sglang.urls-per-replica")
    elif rollout.replicas * size > pool.devices:
        total = f"{rollout.replicas} replicas x {size} = {rollout.replicas * size} devices"
        text = f"{total} are more than {pool.text}"
        yield Problem(f"{ROLLOUT}.replicas", rollout.replicas, text, code="layout.too-many-replicas")
    elif tp > 1 and rollout.name == "embedded":
        text = f"{ROLLOUT}.name=embedded runs each replica on one device; set 1"
        yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", tp, text, code="engine.one-device")
    elif (split := _nodes_of_replicas(rollout, trainer)) and split[1] % size:
        if size % split[1]:
            text = f"must divide {split[0]}={split[1]}, or be a multiple of it, for replicas on whole nodes"
            yield Problem(f"{ROLLOUT}.tensor_model_parallel_size", tp, text, code="layout.replica-nodes")
        elif sglang.mode != "in_process":
            text = f"a server is on one node, and {size} devices are on {size // split[1]}; set in_process"
            yield Problem(f"{ROLLOUT}.engine_kwargs.sglang.mode", sglang.mode, text, code="sglang.server-on-nodes")


def weight_sync(config: TrainConfig) -> Iterator[Problem]:
    """Check that the transport of the weight sync fits devices and nodes."""
    sync, trainer = config.sync, config.trainer
    if trainer.device == "cpu" and sync.transport in ("cuda_ipc", "nccl"):
        text = "moves GPU memory and trainer.device is cpu; set auto"
        yield Problem("sync.transport", sync.transport, text, code="sync.transport-on-cpu")
    if trainer.nnodes > 1 and sync.transport in ("shared_memory", "cuda_ipc"):
        text = f"does not lead from one node to another and trainer.nnodes={trainer.nnodes}; set auto"
        yield Problem("sync.transport", sync.transport, text, code="sync.transport-across-nodes")


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
    return _keyed_pool(path, keys.nnodes, keys.n_gpus_per_node or 1) if keys and keys.nnodes else _trainers(trainer)


def _trainers(trainer: RunConfig) -> _Pool:
    return _keyed_pool("trainer", trainer.nnodes, trainer.n_gpus_per_node)


def _keyed_pool(path: str, nodes: int, per_node: int) -> _Pool:
    devices = nodes * per_node
    return _Pool(devices, f"the pool of {devices} ({path}.nnodes={nodes} x {path}.n_gpus_per_node={per_node})")


def _role_layout(config: ScoredJobConfig, megatron: MegatronConfig, pool: _Pool, path: str) -> Iterator[Problem]:
    """Check the layout of a role that inherits the actor's, without the problems that the actor has too."""
    of_actor: set[tuple[str, str, str]] = set()
    if isinstance(config, TrainConfig):
        actors = _layout(config.actor_rollout_ref.actor.megatron, _trainers(config.trainer), path)
        of_actor = {(problem.path, str(problem.value), problem.code) for problem in actors}
    for problem in _layout(megatron, pool, path):
        if (problem.path, str(problem.value), problem.code) not in of_actor:
            note = inheritance_note(config, f"{problem.path}={problem.value}")
            yield problem._replace(text=f"{problem.text}{note}")


def _layout(megatron: MegatronConfig, pool: _Pool, path: str) -> Iterator[Problem]:
    """Check the layout of one role, as far as possible without its model; ``path`` is the key of its section."""
    trains = not path.endswith(".ref.megatron")  # which has the actor's fields
    fields = override_problems(megatron.override_transformer_config, trains=trains)
    for problem in (*_devices(megatron, pool), *_pipeline(megatron), *_memory(megatron), *fields):
        yield problem._replace(path=f"{path}.{problem.path}")


def _devices(megatron: MegatronConfig, pool: _Pool) -> Iterator[Problem]:
    sizes = {key: getattr(megatron, key) for key in REPLICA_SIZES}
    used = {key: size for key, size in sizes.items() if size > 1 or key != "context_parallel_size"}
    product = " x ".join(f"{REPLICA_SIZES[key]} parallel {size}" for key, size in used.items())
    replica, dp = megatron.devices_per_replica, megatron.data_parallel_size
    if dp is None:
        key, right = _divide(sizes, pool.devices)
        text = f"{product} = {replica} devices per replica do not divide {pool.text}"
        text = f"{text}; valid with the other sizes: {right}" if right else text
        yield Problem(key, sizes[key], text, code="layout.replicas-do-not-divide")
    elif replica * dp > pool.devices:
        most = pool.devices // replica
        text = f"{product} x data parallel {dp} = {replica * dp} devices are more than {pool.text}"
        text = f"{text}; set {most} at most" if most else text
        yield Problem("data_parallel_size", dp, text, code="layout.too-many-devices")


def _divide(sizes: dict[str, int], devices: int) -> tuple[str, str]:
    """The first size that alone can be changed to divide the devices, and its valid values."""
    large = [key for key, size in sizes.items() if size > 1]
    for key in large:
        rest = math.prod(size for name, size in sizes.items() if name != key)
        right = [str(n) for n in range(1, devices + 1) if devices % (n * rest) == 0]
        if right:
            return key, ", ".join(right)
    return large[0], ""


def _pipeline(megatron: MegatronConfig) -> Iterator[Problem]:
    fixed = {
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage is not None,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage is not None,
    }
    counted = {
        "account_for_embedding_in_pipeline_split": megatron.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": megatron.account_for_loss_in_pipeline_split,
    }
    chunks = megatron.virtual_pipeline_model_parallel_size
    interleaved = (chunks or 1) > 1
    if megatron.pipeline_model_parallel_size == 1:
        if interleaved:
            text = "needs pipeline_model_parallel_size of at least 2; set null"
            yield Problem("virtual_pipeline_model_parallel_size", chunks, text, code="layout.virtual-pipeline")
        for keys, off in ((fixed, "null"), (counted, "false")):
            for key in (key for key, is_set in keys.items() if is_set):
                text = f"there is one stage only (pipeline_model_parallel_size=1); set {off}"
                yield Problem(key, getattr(megatron, key), text, code="layout.single-stage")
    elif any(fixed.values()):
        names = " and ".join(name for name, is_set in fixed.items() if is_set)
        for key in (key for key, is_set in counted.items() if is_set):
            text = f"{names} already sets the split of layers; set false here, or null there"
            yield Problem(key, True, text, code="layout.two-layer-splits")
    if megatron.override_transformer_config.get("overlap_p2p_comm") is True and not interleaved:
        key, text = "override_transformer_config.overlap_p2p_comm", "needs virtual_pipeline_model_parallel_size >= 2"
        yield Problem(key, True, text, code="layout.overlap-p2p-comm")


def _memory(megatron: MegatronConfig) -> Iterator[Problem]:
    if megatron.overlap_param_gather and not megatron.use_distributed_optimizer:
        text = "needs use_distributed_optimizer=true, which is false: nothing is gathered"
        yield Problem("overlap_param_gather", True, text, code="layout.overlap-param-gather")
    full = megatron.recompute_granularity == "full"
    for key, value in (
        ("recompute_method", megatron.recompute_method),
        ("recompute_num_layers", megatron.recompute_num_layers),
    ):
        if value is not None and not full:
            text = "has no effect without recompute_granularity=full; set auto"
            yield Problem(key, value, text, code="layout.recompute-not-full")
    if megatron.recompute_granularity == "selective" and not megatron.recompute_modules:
        text = "recompute_granularity=selective needs at least one"
        yield Problem("recompute_modules", megatron.recompute_modules, text, code="layout.no-recompute-modules")
