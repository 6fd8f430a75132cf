"""What a cluster is made of, as far as the time of a step depends on it: read from ``configs/hardware/*.yaml``."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from megarl.amounts import GIB
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.build import read
from megarl.config.compose import HARDWARE, REPOSITORY_CONFIGS
from megarl.config.keys import REQUIRED, key, section
from megarl.config.problems import InvalidConfigError, Problem, nearest_keys
from megarl.errors import ConfigError

FOLDER = REPOSITORY_CONFIGS / HARDWARE


@dataclass
class PeakConfig:
    """Operations that one device does at most."""

    bfloat16: float = key(REQUIRED, "TFLOP/s of dense bfloat16 matrix products.", above=0)
    float32: float = key(REQUIRED, "TFLOP/s of float32 matrix products.", above=0)


@dataclass
class LinkConfig:
    """What connects devices; GB/s are 1e9 bytes per second, of one device and in one direction."""

    intra_node: float = key(REQUIRED, "GB/s between devices of a node.", above=0)
    network: float = key(REQUIRED, "GB/s between nodes.", above=0)
    host: float = key(REQUIRED, "GB/s between a device and its node's memory, all devices copying at once.", above=0)


@dataclass
class SharesConfig:
    """Which share of a peak is really reached; what the files of megarl have, and why, is said in them."""

    matmul: float = key(REQUIRED, "Of the peak: large matrix products of training and prefill.", above=0, at_most=1)
    experts: float = key(
        REQUIRED, "Of the peak: grouped products of a mixture's experts, with their permutations.", above=0, at_most=1
    )
    attention: float = key(REQUIRED, "Of the peak: attention's products, on long sequences.", above=0, at_most=1)
    memory: float = key(REQUIRED, "Of the memory's bandwidth: reading weights and caches.", above=0, at_most=1)
    collective: float = key(REQUIRED, "Of a link's bandwidth: large collectives.", above=0, at_most=1)
    host: float = key(REQUIRED, "Of the host link's bandwidth: copies of offloaded states.", above=0, at_most=1)


@dataclass
class LatencyConfig:
    """Times that do not depend on sizes."""

    collective_us: float = key(REQUIRED, "Microseconds of a small collective inside a node.", at_least=0)
    network_us: float = key(REQUIRED, "Microseconds of a small collective between nodes.", at_least=0)
    decode_step_ms: float = key(
        REQUIRED, "Milliseconds of an engine's step beyond its mathematics: scheduler, sampling.", at_least=0
    )
    layer_us: float = key(
        REQUIRED,
        "Microseconds that a layer's forward takes at least: launching its kernels.",
        at_least=0,
    )


@dataclass
class Hardware:
    """One kind of node."""

    name: str = key(REQUIRED, "How reports call it.")
    device: str = key("cuda", "What computes; what `trainer.device=auto` stands for.", choices=("cuda", "cpu"))
    devices_per_node: int = key(REQUIRED, "Devices of a node.", at_least=1)
    memory_gib: float = key(REQUIRED, "GiB of memory of a device, as its driver reports it.", above=0)
    reserved_gib: float = key(
        REQUIRED,
        "GiB of it that each process takes before any tensor: context, collectives' buffers.",
        at_least=0,
    )
    memory_bandwidth: float = key(REQUIRED, "GB/s of the device's memory.", above=0)
    host_memory_gib: float = key(REQUIRED, "GiB of memory of a node.", above=0)
    peak: PeakConfig = section(PeakConfig)
    links: LinkConfig = section(LinkConfig)
    shares: SharesConfig = section(SharesConfig)
    latency: LatencyConfig = section(LatencyConfig)

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory of a device."""
        return self.memory_gib * GIB

    @property
    def reserved_bytes(self) -> float:
        """Bytes of a device that each process takes for itself."""
        return self.reserved_gib * GIB

    @property
    def host_bytes(self) -> float:
        """Bytes of memory of a node."""
        return self.host_memory_gib * GIB

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of a device at most.

        Args:
            dtype: ``bfloat16`` or ``float32``.
        """
        return cast(float, getattr(self.peak, dtype)) * 1e12

    def products_s(self, flops: float, dtype: str) -> float:
        """Seconds that a device needs for large matrix products."""
        return flops / (self.peak_flops(dtype) * self.shares.matmul)

    def experts_s(self, flops: float, dtype: str) -> float:
        """Seconds that a device needs for the grouped products of experts."""
        return flops / (self.peak_flops(dtype) * self.shares.experts)

    def attention_s(self, flops: float, dtype: str) -> float:
        """Seconds that a device needs for attention's products."""
        return flops / (self.peak_flops(dtype) * self.shares.attention)

    def reading_s(self, nbytes: float) -> float:
        """Seconds in which a device reads or writes so many bytes of its memory."""
        return nbytes / (self.memory_bandwidth * 1e9 * self.shares.memory)

    def host_copy_s(self, nbytes: float) -> float:
        """Seconds in which every device of a node copies so many bytes to or from the host's memory."""
        return nbytes / (self.links.host * 1e9 * self.shares.host)

    def transfer_s(self, nbytes: float, *, within_node: bool) -> float:
        """Seconds in which a device sends, or receives, so many bytes in a large collective."""
        link = self.links.intra_node if within_node else self.links.network
        return nbytes / (link * 1e9 * self.shares.collective)

    def latency_s(self, *, within_node: bool) -> float:
        """Seconds of a collective of a few bytes."""
        return (self.latency.collective_us if within_node else self.latency.network_us) * 1e-6


def known_hardware() -> list[str]:
    """Names of the files that come with megarl."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def hardware_of(config: TrainConfig | SupervisedConfig, name: str | None = None) -> Hardware:
    """The nodes that a configuration is planned for.

    Args:
        config: complete.
        name: as for :func:`read_hardware`; None = that of ``trainer.hardware``, or what goes with ``trainer.device``.

    Raises:
        ConfigError: as :func:`read_hardware`; or the configuration asks more devices of a node than it has.
    """
    trainer, key = config.trainer, "--hardware" if name else "trainer.hardware"
    hardware = read_hardware(name or trainer.hardware or ("cpu" if trainer.device == "cpu" else "h100"), key)
    # On a CPU processes may share cores.
    if hardware.device == "cuda" and trainer.n_gpus_per_node > hardware.devices_per_node:
        raise ConfigError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, but a node of {key}={hardware.name} has "
            f"{hardware.devices_per_node} devices; set {hardware.devices_per_node} at most, and more trainer.nnodes"
        )
    return hardware


def read_hardware(name: str, key: str = "--hardware") -> Hardware:
    """Reads the description of a node.

    Args:
        name: of a file that comes with megarl, such as ``h100``, or the path of a file of one's own.
        key: where the name was given, for the message of an error.

    Raises:
        ConfigError: there is no such file, or it is no YAML; for wrong fields an ``InvalidConfigError`` with all.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) or "/" in name else FOLDER / f"{name}.yaml"
    if not file.is_file():
        known = known_hardware()
        near = nearest_keys(name.lower(), known)
        guess = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(
            f"{key}={name}: there is no file {file}{guess} Known: {', '.join(known)}, or the path of a file of your own"
        )
    try:
        values: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}, expected the fields of a hardware file")
    try:
        return cast(Hardware, read(Hardware, values))
    except InvalidConfigError as error:
        raise InvalidConfigError(Problem(f"{file.name}: {p.path}", *p[1:]) for p in error.problems) from None
