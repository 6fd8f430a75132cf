"""Requirements of a run for each machine, from its configuration or from defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from megarl.base.errors import ModelError
from megarl.base.formatting import GIB, MIB
from megarl.config import GenerateConfig, ScoredJobConfig, TrainConfig
from megarl.config.schema.jobs import CRITIC, JobConfig, RewardTrainingConfig, SupervisedConfig, own_pools
from megarl.config.schema.model import MegatronConfig
from megarl.models import WeightMap, read_model_config

RAY_PORTS = (6379, 8265)
"""Default ports of Ray's head: the cluster's address and the dashboard."""

_STATE_BYTES = 16  # per parameter of a checkpoint: weight, the optimizer's float32 copy, two moments
_HOST_BYTES = {"cpu": 1 * GIB, "cuda": 4 * GIB}  # of a process without its weights: torch, CUDA's context, buffers
_OBJECT_STORE_BYTES = 200 * MIB


@dataclass(frozen=True)
class Needs:
    """Requirements of a run for one machine.

    Attributes:
        device: ``cpu``, ``cuda``, or ``auto`` (GPUs if present).
        devices: devices per machine; None = all that are present.
        nodes: number of machines of the run, those of roles with devices of their own included.
        trainer_nodes: number of machines that write a checkpoint.
        checkpoint_dir: folder of the checkpoints; it may be missing.
        checkpoint_bytes: size of one checkpoint of the whole run; None = unknown.
        models: Hugging Face folders that must be readable.
        readable: data files and folders that must be readable.
        engine: name of the rollout engine; None without one.
        trackers: entries of ``trainer.logger``.
        shared_memory_bytes: upper limit of the shared memory of all processes of this machine.
        host_bytes: host memory.
        ports: ports that must be free.
        watched_ports: ports that cause a warning if they are in use.
        peers: names of the other machines; they must resolve.
        quick: skip the slow checks (disk speed, all-reduce).
    """

    device: str = "auto"
    devices: int | None = None
    nodes: int = 1
    trainer_nodes: int = 1
    checkpoint_dir: str | None = None
    checkpoint_bytes: int | None = None
    models: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    engine: str | None = None
    trackers: tuple[str, ...] = ()
    shared_memory_bytes: int = 2 * 256 * MIB + _OBJECT_STORE_BYTES
    host_bytes: int = 4 * GIB
    ports: tuple[int, ...] = ()
    watched_ports: tuple[int, ...] = RAY_PORTS
    peers: tuple[str, ...] = ()
    quick: bool = False


def needs_of(config: JobConfig) -> Needs:
    """Derive the requirements of a job for each of its machines.

    Sizes are unknown if a model's ``config.json`` cannot be read; :func:`check_folders` reports that.
    """
    trainer = config.trainer
    pools = own_pools(config)
    devices = max([trainer.n_gpus_per_node, *(pool.n_gpus_per_node or 1 for pool in pools.values())])
    nodes = trainer.nnodes + sum(pool.nnodes for pool in pools.values())
    # The critic writes its part of a checkpoint on its nodes.
    writers = trainer.nnodes + (pools[CRITIC].nnodes if CRITIC in pools else 0)
    needs = Needs(device=trainer.device, devices=devices, nodes=nodes, trainer_nodes=writers)
    learners = _learners(config)
    parameters = [(_parameters(path, head), megatron) for path, megatron, head in learners]
    counts = [count for count, _ in parameters if count is not None]
    state = _STATE_BYTES * sum(counts) if learners and len(counts) == len(learners) else None
    process = _HOST_BYTES["cpu" if trainer.device == "cpu" else "cuda"] * devices
    offloaded = sum((count or 0) * _offloaded(megatron) for count, megatron in parameters)
    needs = replace(needs, host_bytes=process + offloaded // trainer.nnodes)
    if isinstance(config, TrainConfig):
        buckets = 2 * config.sync.bucket_megabytes * MIB * devices
        needs = replace(needs, shared_memory_bytes=buckets + _OBJECT_STORE_BYTES)
    if saves := getattr(trainer, "save_freq", -1) > 0:
        needs = replace(needs, checkpoint_dir=str(getattr(trainer, "default_local_dir", None)))
    files = [*getattr(config.data, "train_files", []), *(getattr(config.data, "val_files", None) or [])]
    return replace(
        needs,
        checkpoint_bytes=state if saves else None,
        models=tuple(dict.fromkeys(_models(config))),
        readable=tuple(file for file in files if not set("*?[$~") & set(file)),
        engine=None if isinstance(config, SupervisedConfig) else config.actor_rollout_ref.rollout.name,
        trackers=() if isinstance(config, GenerateConfig) else tuple(trainer.logger),
    )


def _learners(config: JobConfig) -> list[tuple[str, MegatronConfig, bool]]:
    """Return model folder, Megatron settings, and whether it has a value head, for every trained role."""
    if isinstance(config, SupervisedConfig):
        return [(config.model.path, config.megatron, isinstance(config, RewardTrainingConfig))]
    if not isinstance(config, TrainConfig):
        return []
    policy = config.actor_rollout_ref
    actor = [(policy.model.path, policy.actor.megatron, False)]
    critic = [(str(config.critic.model.path), config.critic.megatron, True)] if config.uses_critic else []
    return actor + critic


def _models(config: JobConfig) -> list[str]:
    if isinstance(config, SupervisedConfig):
        return [config.model.path]
    paths = [config.actor_rollout_ref.model.path, *(path for path, _, _ in _learners(config))]
    if isinstance(config, ScoredJobConfig) and config.reward.model.enable:
        paths.append(str(config.reward.model.path))
    return paths


def _parameters(path: str, value_head: bool) -> int | None:
    if not Path(path).is_dir():
        return None
    try:
        shapes = WeightMap(read_model_config(path), value_head).hf_shapes()
    except ModelError:
        return None
    return sum(map(prod, shapes.values()))


def _offloaded(megatron: MegatronConfig) -> int:
    """Bytes of host memory per parameter: bfloat16 weights, float32 optimizer state."""
    return 2 * megatron.param_offload + 12 * megatron.optimizer_offload
