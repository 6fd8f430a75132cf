"""Which machines have joined a cluster, and waiting for those that have not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ray

from megarl.cluster.resources import RESOURCE_NAMES
from megarl.errors import ResourceError

_POLL_S = 0.5


def wait_for_nodes(
    names: Sequence[str], device: Literal["auto", "cpu", "cuda"], devices: int, timeout_s: float
) -> dict[str, str]:
    """Wait until the connected cluster has all nodes, each with its devices.

    Args:
        names: as the nodes were started, by ``ray start --node-name``.
        device: what is counted; ``auto``: nothing is.
        devices: GPUs, or CPU slots, that each node must have.
        timeout_s: seconds to wait.

    Returns:
        The address of each node.

    Raises:
        ResourceError: names the nodes that are missing, and those that have too few devices.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        there = {str(node["NodeName"]): node for node in ray.nodes() if node["Alive"]}
        if all(name in there for name in names):
            break
        if time.monotonic() > deadline:
            raise ResourceError(_missing(names, list(there), timeout_s))
        time.sleep(_POLL_S)
    if device != "auto":
        _check_devices({name: there[name] for name in names}, device, devices)
    return {name: str(there[name]["NodeManagerAddress"]) for name in names}


def _missing(names: Sequence[str], there: Sequence[str], timeout_s: float) -> str:
    missing = [name for name in names if name not in there]
    return (
        f"after {timeout_s:g} s {len(missing)} of {len(names)} nodes have not joined the Ray cluster: "
        f"{', '.join(missing)}. Joined: {', '.join(there) or 'none'}. Can they reach the head's address and ports "
        "(docs/launch.md, Ports)?"
    )


def _check_devices(nodes: Mapping[str, Mapping[str, Any]], device: Literal["cpu", "cuda"], devices: int) -> None:
    kind = RESOURCE_NAMES[device]
    counts = {name: node["Resources"].get(kind, 0.0) for name, node in nodes.items()}
    short = ", ".join(f"{name} has {count:g}" for name, count in counts.items() if count < devices)
    if short:
        raise ResourceError(
            f"trainer.n_gpus_per_node={devices} {kind}s are needed on every node, but {short}. Use nodes that have "
            "them, make them visible (CUDA_VISIBLE_DEVICES, the scheduler's GPU request), or lower "
            "trainer.n_gpus_per_node."
        )
