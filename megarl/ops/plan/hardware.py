"""Hardware of a node, read from ``configs/hardware/*.yaml``, and costs of its collectives: seconds at peak speeds.

Ranks are numbered in the order tensor, context, data, pipeline parallel, node by node. A ring of ``n`` ranks moves
``(n - 1) / n`` of the data once for an all-gather or reduce-scatter, twice for an all-reduce. A group with several
ranks per node uses that many network adapters at once, as NCCL does.
"""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import psutil
import yaml

from megarl.base.errors import ConfigError
from megarl.base.formatting import GIB
from megarl.base.nvidia_smi import Gpu, visible_gpus
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.build import read
from megarl.config.compose import HARDWARE, REPOSITORY_CONFIGS
from megarl.config.keys import REQUIRED, key, section
from megarl.config.problems import InvalidConfigError, nearest_keys
from megarl.config.schema.jobs import own_pools
from megarl.models import ParallelLayout

FOLDER = REPOSITORY_CONFIGS / HARDWARE
_DEFAULT = "h100"


@dataclass
class PeakConfig:
    """Peak compute of one device."""

    bfloat16: float = key(REQUIRED, "TFLOP/s of dense bfloat16 matrix products.", above=0)
    float32: float = key(REQUIRED, "TFLOP/s of float32 matrix products.", above=0)


@dataclass
class LinkConfig:
    """Links between devices, in GB/s (1e9 bytes per second) per device and direction."""

    intra_node: float = key(REQUIRED, "GB/s between devices of a node.", above=0)
    network: float = key(REQUIRED, "GB/s between nodes.", above=0)
    host: float = key(REQUIRED, "GB/s between a device and its node's memory, all devices copying at once.", above=0)


@dataclass
class LatencyConfig:
    """Latencies, independent of sizes."""

    collective_us: float = key(REQUIRED, "Microseconds of a small collective inside a node.", at_least=0)
    network_us: float = key(REQUIRED, "Microseconds of a small collective between nodes.", at_least=0)
    layer_us: float = key(
        REQUIRED,
        "Minimum microseconds of a layer's forward: kernel launches.",
        at_least=0,
    )


@dataclass
class Hardware:
    """One kind of node."""

    name: str = key(REQUIRED, "Name in reports.")
    device: str = key("cuda", "Device type, used for `trainer.device=auto`.", choices=("cuda", "cpu"))
    devices_per_node: int = key(REQUIRED, "Devices of a node.", at_least=1)
    memory_gib: float = key(REQUIRED, "GiB of memory of a device, as its driver reports it.", above=0)
    reserved_gib: float = key(
        REQUIRED,
        "GiB of device memory that each process uses before any tensor: context, collective buffers.",
        at_least=0,
    )
    memory_bandwidth: float = key(REQUIRED, "GB/s of the device's memory.", above=0)
    host_memory_gib: float = key(REQUIRED, "GiB of memory of a node.", above=0)
    peak: PeakConfig = section(PeakConfig)
    links: LinkConfig = section(LinkConfig)
    latency: LatencyConfig = section(LatencyConfig)
    efficiencies: dict[str, float] = key(
        {}, "Fraction of the peak speeds that each phase of a step reaches, as `megarl plan --calibrate` writes them."
    )

    def efficiency(self, phase: str) -> float:
        """Return the calibrated efficiency of a phase; the mean of the others for a phase without one."""
        known = self.efficiencies
        return known[phase] if phase in known else fmean(known.values() or [1.0])

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory per device."""
        return self.memory_gib * GIB

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory per node."""
        return self.host_memory_gib * GIB

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of a device in ``bfloat16`` or ``float32``."""
        return cast(float, getattr(self.peak, dtype)) * 1e12

    def compute_s(self, flops: float, dtype: str) -> float:
        """Return the seconds of FLOPs on one device."""
        return flops / self.peak_flops(dtype)

    def reading_s(self, nbytes: float) -> float:
        """Return the seconds to read or write a number of bytes of device memory."""
        return nbytes / (self.memory_bandwidth * 1e9)

    def host_copy_s(self, nbytes: float) -> float:
        """Return the seconds to copy bytes to or from host memory, while all devices of the node copy."""
        return nbytes / (self.links.host * 1e9)

    def transfer_s(self, nbytes: float, *, within_node: bool) -> float:
        """Return the seconds to send or receive a number of bytes in a large collective."""
        return nbytes / (1e9 * (self.links.intra_node if within_node else self.links.network))

    def latency_s(self, *, within_node: bool) -> float:
        """Return the seconds of a collective of a few bytes."""
        return (self.latency.collective_us if within_node else self.latency.network_us) * 1e-6


def known_hardware() -> list[str]:
    """Return the names of the hardware files that megarl ships."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def hardware_of(config: TrainConfig | SupervisedConfig, name: str | None = None) -> Hardware:
    """Return the hardware that a configuration is planned for.

    Args:
        name: as for :func:`read_hardware`; None = ``trainer.hardware``, or the default of ``trainer.device``.

    Raises:
        ConfigError: as :func:`read_hardware`; or the configuration uses more devices per node than the node has.
    """
    trainer, key = config.trainer, "--hardware" if name else "trainer.hardware"
    hardware = read_hardware(name or trainer.hardware or ("cpu" if trainer.device == "cpu" else _DEFAULT), key)
    own = {path: pool.n_gpus_per_node or 1 for path, pool in own_pools(config).items()}
    for path, devices in {"trainer": trainer.n_gpus_per_node, **own}.items():
        # On a CPU processes may share cores.
        if hardware.device == "cuda" and devices > hardware.devices_per_node:
            raise ConfigError(
                f"{path}.n_gpus_per_node={devices}, but a node of {key}={hardware.name} has "
                f"{hardware.devices_per_node} devices; set {hardware.devices_per_node} at most, and more {path}.nnodes",
                code="plan.devices-per-node",
            )
    return hardware


def read_hardware(name: str, key: str = "--hardware") -> Hardware:
    """Read the hardware file of a node.

    Args:
        name: name of a shipped file, such as ``h100``, or path of a custom file.

    Raises:
        ConfigError: the file does not exist or is no YAML; wrong fields raise ``InvalidConfigError`` with all problems.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) or "/" in name else FOLDER / f"{name}.yaml"
    if not file.is_file():
        names = known_hardware()
        near = nearest_keys(name.lower(), names)
        guess = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(
            f"{key}={name}: no such file: {file}{guess} Known: {', '.join(names)}, or the path of a custom file",
            code="plan.no-hardware-file",
        )
    try:
        values: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}", code="plan.hardware-not-yaml") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} holds a {type(values).__name__}, expected the fields of a hardware file",
            code="plan.hardware-no-fields",
        )
    try:
        return cast(Hardware, read(Hardware, values))
    except InvalidConfigError as error:
        raise InvalidConfigError(p._replace(path=f"{file.name}: {p.path}") for p in error.problems) from None


def hardware_for(config: TrainConfig | SupervisedConfig, name: str | None = None) -> Hardware:
    """Return the hardware for which ``layout=auto`` plans.

    It is the named one; else this machine's, whose GPUs have the speeds of their kind's hardware file and their own
    memory; else, for the GPUs of another machine, an H100 node. A ``name`` replaces ``trainer.hardware``.

    Raises:
        ConfigError: there is no such hardware file.
    """
    trainer = config.trainer
    if name or trainer.hardware:
        return read_hardware(name or str(trainer.hardware), "--hardware" if name else "trainer.hardware")
    gpus = visible_gpus() if trainer.device != "cpu" else ()
    if gpus:
        return gpu_hardware(gpus, psutil.virtual_memory().total)
    elsewhere = trainer.device == "cuda" or (trainer.device == "auto" and "RAY_ADDRESS" in os.environ)
    return read_hardware(_DEFAULT if elsewhere else "cpu", "trainer.hardware")


def gpu_hardware(gpus: tuple[Gpu, ...], host_bytes: int) -> Hardware:
    """Return a node with these GPUs, of which the smallest memory counts; unknown kinds are as fast as an H100."""
    words = gpus[0].name.lower().replace("-", " ").split()
    kind = next((name for name in known_hardware() if name in words), _DEFAULT)
    return replace(
        read_hardware(kind),
        name=gpus[0].name,
        devices_per_node=len(gpus),
        memory_gib=round(min(gpu.total_bytes for gpu in gpus) / GIB, 1),
        host_memory_gib=round(host_bytes / GIB),
    )


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks of a collective: ``size`` ranks, every ``stride``-th."""

    size: int  # number of ranks
    stride: int  # distance between neighbors in the rank order
    devices_per_node: int  # devices per node of the cluster

    @property
    def per_node(self) -> int:
        """Ranks of the group on each node."""
        return max(1, min(self.size, self.devices_per_node // self.stride))

    @property
    def within_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.per_node == self.size

    def gather_s(self, nbytes: float, hardware: Hardware) -> float:
        """Return the seconds of an all-gather or reduce-scatter; ``nbytes`` is the size of the gathered tensor."""
        if self.size == 1:
            return 0.0
        moved = nbytes * (self.size - 1) / self.size
        seconds = hardware.transfer_s(moved, within_node=True)
        if not self.within_node:
            seconds = max(seconds, hardware.transfer_s(moved / self.per_node, within_node=False))
        return seconds + hardware.latency_s(within_node=self.within_node)

    def reduce_s(self, nbytes: float, hardware: Hardware) -> float:
        """Return the seconds of an all-reduce."""
        return 2 * self.gather_s(nbytes, hardware)

    def exchange_s(self, nbytes: float, hardware: Hardware) -> float:
        """Return the seconds of an all-to-all; each rank sends ``nbytes``, evenly to all ranks."""
        if self.size == 1:
            return 0.0
        inside = hardware.transfer_s(nbytes * (self.per_node - 1) / self.size, within_node=True)
        outside = hardware.transfer_s(nbytes * (self.size - self.per_node) / self.size, within_node=False)
        return max(inside, outside) + hardware.latency_s(within_node=self.within_node)

    def send_s(self, nbytes: float, hardware: Hardware) -> float:
        """Return the seconds to send ``nbytes`` to the next rank."""
        if self.size == 1:
            return 0.0
        within = self.stride * self.size <= self.devices_per_node
        return hardware.transfer_s(nbytes, within_node=within) + hardware.latency_s(within_node=within)


@dataclass(frozen=True)
class CollectiveGroups:
    """The process groups of a layout."""

    tensor: CollectiveGroup
    context: CollectiveGroup
    data: CollectiveGroup  # data and context parallel: gradients are summed over it
    pipeline: CollectiveGroup
    expert: CollectiveGroup
    expert_tensor: CollectiveGroup
    expert_data: CollectiveGroup

    @classmethod
    def of(cls, layout: ParallelLayout, devices_per_node: int) -> CollectiveGroups:
        """Return the groups of a layout."""

        def group(size: int, stride: int) -> CollectiveGroup:
            return CollectiveGroup(size, stride, devices_per_node)

        return cls(
            tensor=group(layout.tp, 1),
            context=group(layout.cp, layout.tp),
            data=group(layout.dp * layout.cp, layout.tp),
            pipeline=group(layout.pp, layout.ranks_per_stage),
            expert=group(layout.ep, layout.expert_tp),
            expert_tensor=group(layout.expert_tp, 1),
            expert_data=group(layout.expert_dp, layout.expert_tp * layout.ep),
        )
