"""Hardware that a run finds: the GPUs of this machine, with their memory, or its CPU."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil

from megarl.base.formatting import GIB
from megarl.base.nvidia_smi import Gpu, visible_gpus
from megarl.config import SupervisedConfig, TrainConfig
from megarl.ops.plan.hardware import Hardware, known_hardware, read_hardware

_DEFAULT = "h100"


def hardware_for(config: TrainConfig | SupervisedConfig, name: str | None = None) -> Hardware:
    """Return the hardware for which ``layout=auto`` plans.

    It is the named one; else this machine's, whose GPUs have the speeds of their kind's hardware file and their own
    memory; else, for the GPUs of another machine, an H100 node.

    Args:
        name: a hardware file; None = ``trainer.hardware``.

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
    """Return a node with these GPUs; GPUs of an unknown kind get the speeds of an H100.

    Args:
        gpus: at least one; the smallest memory counts.
    """
    words = gpus[0].name.lower().replace("-", " ").split()
    kind = next((name for name in known_hardware() if name in words), _DEFAULT)
    return replace(
        read_hardware(kind),
        name=gpus[0].name,
        devices_per_node=len(gpus),
        memory_gib=round(min(gpu.total_bytes for gpu in gpus) / GIB, 1),
        host_memory_gib=round(host_bytes / GIB),
    )
