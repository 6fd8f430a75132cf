"""Devices of a job: their kind, their check before Ray starts, their reservation, and Ray's dashboard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from megarl.base.errors import ConfigError, ResourceError
from megarl.base.units import count_noun
from megarl.cluster import PlacedPool, RaySession, ResourcePool, check_resources
from megarl.cluster.availability import NO_GPU_REMEDY, check_cluster_answers, local_node
from megarl.cluster.local_ray import dashboard_error
from megarl.cluster.resources import cluster_nodes
from megarl.config.schema.jobs import TrainConfig
from megarl.config.schema.run import RunConfig

_POOL, _ENGINE_POOL = "devices", "engines"


def check_devices(run: RunConfig, engines: int = 0) -> None:
    """Check the devices before Ray starts: those of this machine, or with ``RAY_ADDRESS`` that its cluster answers.

    The devices of a cluster are counted by :func:`reserve_devices`, after the connection.

    Args:
        run: devices of the trainer.
        engines: devices of the rollout engines alone.

    Raises:
        ConfigError: this machine has too few devices.
        ResourceError: the cluster does not answer.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        check_cluster_answers(address)
        return
    node = local_node()
    pool = _pool(run, [node])
    pools = [pool, *([ResourcePool(_ENGINE_POOL, pool.device, [engines])] if engines else [])]
    try:
        check_resources(pools, [node])
    except ResourceError as error:
        if engines:
            keys = f"{_keys(run, pool.device)}, {count_noun(engines, 'device')} of actor_rollout_ref.rollout.nnodes"
            raise ConfigError(f"{keys}: {error}") from error
        raise ConfigError(f"{_keys(run, pool.device)}: {_local_shortage(pool, node)}") from error


def engine_devices(config: object) -> int:
    """Count the devices of the rollout engines alone; 0 if they share the trainer's, or the job has none."""
    return config.actor_rollout_ref.rollout.own_devices if isinstance(config, TrainConfig) else 0


def reserve_devices(session: RaySession, run: RunConfig) -> PlacedPool:
    """Reserve the devices of a job in the connected cluster.

    Raises:
        ResourceError: the cluster lacks the devices, or other jobs hold them.
    """
    pool = _pool(run, cluster_nodes())
    try:
        return session.place([pool])[_POOL]
    except ResourceError as error:
        cluster = f" The cluster is that of RAY_ADDRESS={session.address}." if session.address else ""
        raise ResourceError(f"{_keys(run, pool.device)}: {error}{cluster}") from error


def reserve_engine_devices(
    session: RaySession, run: RunConfig, trainer: PlacedPool, per_node: Sequence[int]
) -> PlacedPool:
    """Reserve the devices of the rollout engines alone.

    Args:
        session: connected.
        run: of the job, for errors.
        trainer: devices of the trainer; the processes of both pools are traced together.
        per_node: devices on each node.

    Raises:
        ResourceError: the cluster lacks the devices, or other jobs hold them.
    """
    pool = ResourcePool(_ENGINE_POOL, trainer.pool.device, per_node)
    try:
        placed = session.place([pool])[_ENGINE_POOL]
        placed.processes = trainer.processes
        return placed
    except ResourceError as error:
        keys = f"actor_rollout_ref.rollout.nnodes={len(per_node)}, {_keys(run, pool.device)}"
        raise ResourceError(f"{keys}: {error}") from error


def resolve_device(device: str, nodes: Sequence[Mapping[str, float]]) -> Literal["cpu", "cuda"]:
    """Resolve ``auto`` to CUDA if a node has a GPU, else to the CPU.

    Args:
        device: ``trainer.device``.
        nodes: total resources of each node.
    """
    if device == "auto":
        device = "cuda" if any(node.get("GPU", 0) > 0 for node in nodes) else "cpu"
    return "cuda" if device == "cuda" else "cpu"


def _pool(run: RunConfig, nodes: Sequence[Mapping[str, float]]) -> ResourcePool:
    return ResourcePool(_POOL, resolve_device(run.device, nodes), [run.n_gpus_per_node] * run.nnodes)


def _keys(run: RunConfig, device: str) -> str:
    resolved = "" if run.device == device else f" ({device})"
    sizes = f"trainer.nnodes={run.nnodes}, trainer.n_gpus_per_node={run.n_gpus_per_node}"
    return f"{sizes}, trainer.device={run.device}{resolved}"


def _local_shortage(pool: ResourcePool, node: Mapping[str, float]) -> str:
    """Message for a pool that this machine cannot hold."""
    cpus, gpus, nodes = int(node["CPU"]), int(node["GPU"]), len(pool.devices_per_node)
    if nodes > 1:
        return (
            f"a run on {nodes} nodes needs a Ray cluster, and this machine is one node: `megarl launch` starts a "
            "cluster and runs the job on it, RAY_ADDRESS names a running one"
        )
    present = f"this machine has {count_noun(gpus, 'GPU')} and {count_noun(cpus, 'CPU core')}"
    if pool.device == "cpu":
        return (
            f"{present}, and each process of a role takes one: set trainer.n_gpus_per_node to at most {cpus}. For more "
            f"processes than cores: `ray start --head --num-cpus={pool.num_devices}`, then RAY_ADDRESS=auto, and "
            "RAY_AUTH_MODE=token if Ray reports token authentication"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if gpus == 0:
        return f"{present}{limit}: {NO_GPU_REMEDY}"
    if gpus >= pool.num_devices:
        return f"{present}, and each GPU takes a core: set trainer.n_gpus_per_node to at most {cpus}, or request cores"
    return (
        f"{present}{limit}: set trainer.n_gpus_per_node to at most {gpus}, or make more of them visible "
        "(CUDA_VISIBLE_DEVICES, the scheduler's GPU request)"
    )


def check_dashboard(run: RunConfig) -> None:
    """Check that the packages of Ray's dashboard are installed, if the run starts Ray with it.

    Raises:
        ConfigError: one is missing.
    """
    if run.ray_dashboard and not os.environ.get("RAY_ADDRESS") and (problem := dashboard_error()):
        raise ConfigError(
            f"trainer.ray_dashboard=true needs the packages of Ray's dashboard ({problem}): pip install "
            "'ray[default]', or set false"
        )
