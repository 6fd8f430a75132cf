"""Requirements of a run for each machine, from its configuration or from defaults."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.base.errors import MegarlError
from megarl.base.formatting import GIB, MIB
from megarl.config import GenerateConfig, ScoredJobConfig, TrainConfig
from megarl.config.schema.jobs import CRITIC, JobConfig, SupervisedConfig, own_pools
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.memory import MemoryPlan, plan_memory

RAY_PORTS = (6379, 8265)  # default ports of Ray's head: the cluster's address and the dashboard

_HOST_BYTES = {"cpu": 1 * GIB, "cuda": 4 * GIB}  # of a process besides the plan's: torch, CUDA's context, buffers
_OBJECT_STORE_BYTES = 200 * MIB
_BUCKET_MEGABYTES = 256


@dataclass(frozen=True)
class Needs:
    """Requirements of a run for one machine."""

    device: str = "auto"  # cpu, cuda, or auto (GPUs if present)
    devices: int | None = None  # devices per machine; None = all that are present
    nodes: int = 1  # number of machines of the run, those of roles with devices of their own included
    trainer_nodes: int = 1  # number of machines that write a checkpoint
    checkpoint_dir: str | None = None  # folder of the checkpoints; it may be missing
    checkpoint_bytes: int | None = None  # size of one checkpoint of the whole run; None = unknown
    models: tuple[str, ...] = ()  # Hugging Face folders that must be readable
    readable: tuple[str, ...] = ()  # data files and folders that must be readable
    engine: str | None = None  # name of the rollout engine; None without one
    trackers: tuple[str, ...] = ()  # entries of trainer.logger
    shared_memory_bytes: int = 2 * _BUCKET_MEGABYTES * MIB + _OBJECT_STORE_BYTES  # of all processes of a machine
    host_bytes: int = 4 * GIB  # host memory
    ports: tuple[int, ...] = ()  # ports that must be free
    watched_ports: tuple[int, ...] = RAY_PORTS  # ports that cause a warning if they are in use
    peers: tuple[str, ...] = ()  # names of the other machines; they must resolve
    quick: bool = False  # skip the slow checks (disk speed, all-reduce)


def needs_of(config: JobConfig) -> Needs:
    """Derive the requirements of a job for each of its machines.

    Memory and checkpoint are those of the plan, and unknown if a model's ``config.json`` cannot be read, which
    :func:`check_folders` reports.
    """
    trainer = config.trainer
    pools = own_pools(config)
    devices = max([trainer.n_gpus_per_node, *(pool.n_gpus_per_node or 1 for pool in pools.values())])
    nodes = trainer.nnodes + sum(pool.nnodes for pool in pools.values())
    # The critic writes its part of a checkpoint on its nodes.
    writers = trainer.nnodes + (pools[CRITIC].nnodes if CRITIC in pools else 0)
    plan = _memory(config)
    process = _HOST_BYTES["cpu" if trainer.device == "cpu" else "cuda"] * devices
    megabytes = config.sync.bucket_megabytes * devices if isinstance(config, TrainConfig) else _BUCKET_MEGABYTES
    saves = getattr(trainer, "save_freq", -1) > 0
    files = [*getattr(config.data, "train_files", []), *(getattr(config.data, "val_files", None) or [])]
    return Needs(
        device=trainer.device,
        devices=devices,
        nodes=nodes,
        trainer_nodes=writers,
        host_bytes=process + (plan.host_bytes if plan else 0),
        shared_memory_bytes=2 * megabytes * MIB + _OBJECT_STORE_BYTES,
        checkpoint_dir=str(getattr(trainer, "default_local_dir", None)) if saves else None,
        checkpoint_bytes=plan.checkpoint_bytes if plan and saves else None,
        models=tuple(dict.fromkeys(_models(config))),
        readable=tuple(file for file in files if not set("*?[$~") & set(file)),
        engine=None if isinstance(config, SupervisedConfig) else config.actor_rollout_ref.rollout.name,
        trackers=() if isinstance(config, GenerateConfig) else tuple(trainer.logger),
    )


def _memory(config: JobConfig) -> MemoryPlan | None:
    """Plan the memory of a job that trains; None if a model cannot be read or has no such layout."""
    if not isinstance(config, TrainConfig | SupervisedConfig):
        return None
    try:
        return plan_memory(planned_job(config))
    except MegarlError:
        return None


def _models(config: JobConfig) -> list[str]:
    if isinstance(config, SupervisedConfig):
        return [config.model.path]
    paths = [config.actor_rollout_ref.model.path]
    if isinstance(config, TrainConfig) and config.uses_critic:
        paths.append(str(config.critic.model.path))
    if isinstance(config, ScoredJobConfig) and config.reward.model.enable:
        paths.append(str(config.reward.model.path))
    return paths
