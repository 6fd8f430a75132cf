"""Inventory of the GPUs of this machine, from the output of ``nvidia-smi``."""

from __future__ import annotations

import os
import shutil
import subprocess
import xml.etree.ElementTree as xml
from dataclasses import dataclass

from megarl.base.formatting import MIB

TIMEOUT_S = 60.0

_THROTTLES = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_UNCORRECTABLE = (
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
    "dram_uncorrectable",
    "double_bit/total",
)


@dataclass(frozen=True)
class Gpu:
    """State of one GPU.

    Attributes:
        processes: processes on the GPU, as ``pid name``.
        uncorrectable: uncorrectable ECC errors since the driver was loaded; None = no ECC.
        remapping: state of row remapping: ``failure``, ``pending``, or empty.
        persistent: whether the driver stays loaded on an idle GPU (persistence mode).
    """

    name: str
    total_bytes: int
    used_bytes: int
    processes: tuple[str, ...]
    uncorrectable: int | None
    remapping: str
    throttled: tuple[str, ...]
    persistent: bool
    mig: bool
    exclusive: bool
    celsius: int | None


@dataclass(frozen=True)
class Inventory:
    """Driver version, newest CUDA version that the driver supports, and the GPUs of a machine."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


def parse_inventory(text: str) -> Inventory:
    """Parse the output of ``nvidia-smi -q -x``.

    Raises:
        ValueError: the text is not XML.
    """
    try:
        root = xml.fromstring(text)  # noqa: S314 - the output of nvidia-smi
    except xml.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x printed no XML: {error}") from error
    gpus = tuple(_gpu(node) for node in root.findall("gpu"))
    return Inventory(_text(root, "driver_version"), _text(root, "cuda_version"), gpus)


def _gpu(node: xml.Element) -> Gpu:
    errors = node.find("ecc_errors/volatile")
    counts = [] if errors is None else [_number(_text(errors, tag)) for tag in _UNCORRECTABLE]
    supported = [count for count in counts if count is not None]
    throttled = {
        reason
        for section, prefix in (("clocks_event_reasons", "event"), ("clocks_throttle_reasons", "throttle"))
        for reason in _THROTTLES
        if _text(node, f"{section}/clocks_{prefix}_reason_{reason}") == "Active"
    }
    remapping = [
        state for state in ("failure", "pending") if _text(node, f"remapped_rows/remapped_row_{state}") == "Yes"
    ]
    return Gpu(
        name=_text(node, "product_name"),
        total_bytes=(_number(_text(node, "fb_memory_usage/total")) or 0) * MIB,
        used_bytes=(_number(_text(node, "fb_memory_usage/used")) or 0) * MIB,
        processes=tuple(
            f"{_text(process, 'pid')} {_text(process, 'process_name')}"
            for process in node.findall("processes/process_info")
        ),
        uncorrectable=sum(supported) if supported else None,
        remapping=remapping[0] if remapping else "",
        throttled=tuple(sorted(throttled)),
        persistent=_text(node, "persistence_mode") != "Disabled",
        mig=_text(node, "mig_mode/current_mig") == "Enabled",
        exclusive=_text(node, "compute_mode") not in ("Default", ""),
        celsius=_number(_text(node, "temperature/gpu_temp")),
    )


def _text(node: xml.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def _number(text: str) -> int | None:
    """Return the leading number of a text such as ``81559 MiB``."""
    first = text.split(" ")[0]
    return int(first) if first.isdigit() else None


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine that this process sees (``CUDA_VISIBLE_DEVICES``); none without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        gpus = parse_inventory(run_nvidia_smi(command, "-q", "-x")).gpus
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()  # the check of devices before the start reports it
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    numbered = [gpus[int(name)] for name in names if name.isdigit() and int(name) < len(gpus)]
    return tuple(numbered) or gpus[: len(names)]


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Parse the link matrix of ``nvidia-smi topo -m``: link type by pair of GPUs, such as ``NV18`` or ``SYS``."""
    rows = [line.split() for line in text.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines() if line.strip()]
    if not rows:
        return {}
    columns = [name for name in rows[0] if name.startswith("GPU") and name[3:].isdigit()]
    links = {}
    for row in rows[1:]:
        if row[0] in columns:
            for column, link in zip(columns, row[1:], strict=False):
                if column != row[0]:
                    links[int(row[0][3:]), int(column[3:])] = link
    return links


def run_nvidia_smi(command: str, *arguments: str) -> str:
    """Return the output of a call of ``nvidia-smi``.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started, fails, or takes more than a minute.
    """
    process = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if process.returncode:
        text = (process.stderr or process.stdout).strip()
        raise subprocess.SubprocessError(f"nvidia-smi {' '.join(arguments)} ended with {process.returncode}: {text}")
    return process.stdout
