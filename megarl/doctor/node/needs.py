"""What a run needs of each machine: from its configuration, or defaults where there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from megarl.amounts import GIB, MIB
from megarl.config import ScoredConfig, TrainConfig
from megarl.config.jobs import JobConfig
from megarl.config.learners import MegatronConfig
from megarl.config.reward_model_schema import RewardTrainingConfig
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ModelError
from megarl.models import WeightMap, read_model_config

RAY_PORTS = (6379, 8265)
"""Where Ray's head listens by default: the cluster's address and the dashboard."""

_STATE_BYTES = 16  # per parameter of a checkpoint: the weight, the optimizer's copy of it in float32, and two means
_HOST_BYTES = {"cpu": 1 * GIB, "cuda": 4 * GIB}  # of a process without its weights: torch, CUDA's context, buffers
_OBJECT_STORE_BYTES = 200 * MIB


@dataclass(frozen=True)
class Needs:
    """What a run needs of a machine.

    Attributes:
        device: ``cpu``, ``cuda``, or ``auto``: GPUs where there are some.
        devices: per machine; None = whatever there is.
        nodes: machines of the run.
        checkpoint_dir: where checkpoints go; it need not exist yet.
        checkpoint_bytes: size of one checkpoint of the whole run; None = not known.
        models: Hugging Face folders that must be readable.
        readable: files and folders of data that must be readable.
        shared_memory_bytes: that processes of this machine share at most.
        host_bytes: main memory.
        ports: that must be free here.
        watched_ports: of which it is worth knowing that they are held.
        peers: names of the other machines, which must resolve.
        quick: leave out what takes seconds: the disk's speed and the all-reduce.
    """

    device: str = "auto"
    devices: int | None = None
    nodes: int = 1
    checkpoint_dir: str | None = None
    checkpoint_bytes: int | None = None
    models: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    shared_memory_bytes: int = 2 * 256 * MIB + _OBJECT_STORE_BYTES
    host_bytes: int = 4 * GIB
    ports: tuple[int, ...] = ()
    watched_ports: tuple[int, ...] = RAY_PORTS
    peers: tuple[str, ...] = ()
    quick: bool = False


def needs_of(config: JobConfig) -> Needs:
    """What a job needs of each of its machines.

    Sizes are left open where a model's ``config.json`` cannot be read, which is a finding of its own.
    """
    trainer = config.trainer
    needs = Needs(device=trainer.device, devices=trainer.n_gpus_per_node, nodes=trainer.nnodes)
    learners = _learners(config)
    parameters = [(_parameters(path, head), megatron) for path, megatron, head in learners]
    known = [count for count, _ in parameters if count is not None]
    state = _STATE_BYTES * sum(known) if learners and len(known) == len(learners) else None
    process = _HOST_BYTES["cpu" if trainer.device == "cpu" else "cuda"] * trainer.n_gpus_per_node
    offloaded = sum((count or 0) * _offloaded(megatron) for count, megatron in parameters)
    needs = replace(needs, host_bytes=process + offloaded // trainer.nnodes)
    if isinstance(config, TrainConfig):
        buckets = 2 * config.sync.bucket_megabytes * MIB * trainer.n_gpus_per_node
        needs = replace(needs, shared_memory_bytes=buckets + _OBJECT_STORE_BYTES)
    if saves := getattr(trainer, "save_freq", -1) > 0:
        needs = replace(needs, checkpoint_dir=str(getattr(trainer, "default_local_dir", None)))
    files = [*getattr(config.data, "train_files", []), *(getattr(config.data, "val_files", None) or [])]
    return replace(
        needs,
        checkpoint_bytes=state if saves else None,
        models=tuple(dict.fromkeys(_models(config))),
        readable=tuple(file for file in files if not set("*?[$~") & set(file)),
    )


def _learners(config: JobConfig) -> list[tuple[str, MegatronConfig, bool]]:
    """Model folder, layout, and whether it has a value head, of every role that learns."""
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
    if isinstance(config, ScoredConfig) and config.reward_model.enable:
        paths.append(str(config.reward_model.model.path))
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
    """Bytes of host memory per parameter: weights in bfloat16, state of the optimizer in float32."""
    return 2 * megatron.param_offload + 12 * megatron.optimizer_offload
