"""Devices of a job: their kind, their check before Ray starts, their reservation, and Ray's dashboard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from megarl.base.errors import ConfigError, ResourceError
from megarl.base.formatting import count_noun
from megarl.cluster.availability import NO_GPU_REMEDY, check_cluster_answers, local_node
from megarl.cluster.ray_internals import dashboard_error
from megarl.cluster.resources import PlacedPool, ResourcePool, check_resources, cluster_nodes
from megarl.cluster.session import RaySession
from megarl.config.schema.model import OwnDevicesConfig
from megarl.config.schema.run import RunConfig

_TRAINER = "trainer"
_NONE: Mapping[str, OwnDevicesConfig] = MappingProxyType({})


class JobPools:
    """Devices of a job's roles: the trainer's pool, and separate pools for roles with their own devices.

    Args:
        trainer: devices of the roles without a pool of their own.
        own: pools by the path of the role's section, such as ``critic``.
    """

    def __init__(self, trainer: PlacedPool, own: Mapping[str, PlacedPool] = MappingProxyType({})) -> None:
        self.trainer = trainer
        self._own = dict(own)
        for pool in self._own.values():
            pool.processes = trainer.processes  # all processes of the job are traced and watched together

    def of(self, section: str) -> PlacedPool:
        """Return a role's devices by its config path."""
        return self._own.get(section, self.trainer)


def check_devices(run: RunConfig, own: Mapping[str, OwnDevicesConfig] = _NONE) -> None:
    """Check the devices before Ray starts: those of this machine, or with ``RAY_ADDRESS`` that its cluster answers.

    The devices of a cluster are counted by :func:`reserve_pools`, after the connection.

    Raises:
        ConfigError: this machine has too few devices.
        ResourceError: the cluster does not answer.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        check_cluster_answers(address)
        return
    node = local_node()
    pools = _pools(run, own, [node])
    try:
        check_resources(pools, [node])
    except ResourceError as error:
        keys = _keys(run, own, pools[0].device)
        if own:
            raise ConfigError(f"{keys}: {error.text}", code=error.code) from error
        raise _local_shortage(keys, pools[0], node) from error


def reserve_pools(session: RaySession, run: RunConfig, own: Mapping[str, OwnDevicesConfig] = _NONE) -> JobPools:
    """Reserve the devices for all roles in the connected cluster.

    Raises:
        ResourceError: the cluster lacks the devices, or other jobs hold them.
    """
    pools = _pools(run, own, cluster_nodes())
    try:
        placed = session.place(pools)
    except ResourceError as error:
        cluster = f" The cluster is that of RAY_ADDRESS={session.address}." if session.address else ""
        raise ResourceError(f"{_keys(run, own, pools[0].device)}: {error.text}{cluster}", code=error.code) from error
    return JobPools(placed.pop(_TRAINER), placed)


def resolve_device(device: str, nodes: Sequence[Mapping[str, float]]) -> Literal["cpu", "cuda"]:
    """Resolve ``auto`` to CUDA if a node has a GPU, else to the CPU.

    Args:
        nodes: total resources of each node.
    """
    if device == "auto":
        device = "cuda" if any(node.get("GPU", 0) > 0 for node in nodes) else "cpu"
    return "cuda" if device == "cuda" else "cpu"


def _pools(
    run: RunConfig, own: Mapping[str, OwnDevicesConfig], nodes: Sequence[Mapping[str, float]]
) -> list[ResourcePool]:
    """The pools of a job, the trainer's first."""
    device = resolve_device(run.device, nodes)
    trainer = ResourcePool(_TRAINER, device, [run.n_gpus_per_node] * run.nnodes)
    return [
        trainer,
        *(ResourcePool(path, device, keys.device_groups, keys.required_groups) for path, keys in own.items()),
    ]


def _keys(run: RunConfig, own: Mapping[str, OwnDevicesConfig], device: str) -> str:
    resolved = "" if run.device == device else f" ({device})"
    pools = {_TRAINER: (run.nnodes, run.n_gpus_per_node)}
    pools |= {path: (keys.nnodes, keys.n_gpus_per_node or 1) for path, keys in own.items()}
    sizes = [f"{path}.nnodes={nodes}, {path}.n_gpus_per_node={devices}" for path, (nodes, devices) in pools.items()]
    return f"{', '.join(sizes)}, trainer.device={run.device}{resolved}"


def _local_shortage(keys: str, pool: ResourcePool, node: Mapping[str, float]) -> ConfigError:
    """Error for a pool that this machine cannot hold."""
    cpus, gpus, nodes = int(node["CPU"]), int(node["GPU"]), len(pool.devices_per_node)
    if nodes > 1:
        return ConfigError(
            f"{keys}: a run on {nodes} nodes needs a Ray cluster, and this machine is one node: `megarl launch` starts "
            "a cluster and runs the job on it, RAY_ADDRESS names a running one",
            code="ray.needs-cluster",
        )
    present = f"{keys}: this machine has {count_noun(gpus, 'GPU')} and {count_noun(cpus, 'CPU core')}"
    if pool.device == "cpu":
        return ConfigError(
            f"{present}, and each process of a role takes one: set trainer.n_gpus_per_node to at most {cpus}. For more "
            f"processes than cores: `ray start --head --num-cpus={pool.num_devices}`, then RAY_ADDRESS=auto, and "
            "RAY_AUTH_MODE=token if Ray reports token authentication",
            code="ray.too-few-cores",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if gpus == 0:
        return ConfigError(f"{present}{limit}: {NO_GPU_REMEDY}", code="ray.no-gpu")
    if gpus >= pool.num_devices:
        return ConfigError(
            f"{present}, and each GPU takes a core: set trainer.n_gpus_per_node to at most {cpus}, or request cores",
            code="ray.too-few-cores",
        )
    return ConfigError(
        f"{present}{limit}: set trainer.n_gpus_per_node to at most {gpus}, or make more of them visible "
        "(CUDA_VISIBLE_DEVICES, the scheduler's GPU request)",
        code="ray.too-few-gpus",
    )


def check_dashboard(run: RunConfig) -> None:
    """Check that the packages of Ray's dashboard are installed, if the run starts Ray with it.

    Raises:
        ConfigError: one is missing.
    """
    if run.ray_dashboard and not os.environ.get("RAY_ADDRESS") and (problem := dashboard_error()):
        raise ConfigError(
            f"trainer.ray_dashboard=true needs the packages of Ray's dashboard ({problem}): pip install "
            "'ray[default]', or set false",
            code="ray.no-dashboard",
        )
