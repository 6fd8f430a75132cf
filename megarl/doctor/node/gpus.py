"""GPUs by what ``nvidia-smi`` says: how many, healthy, free, connected, and with a driver for torch's CUDA."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.doctor.node.finding import Finding, Status
from megarl.doctor.node.needs import MIB, Needs

TIMEOUT_S = 60.0
IDLE_BYTES = 1024 * MIB
"""A GPU that nobody uses has less than this taken, by the driver."""

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
    """One GPU.

    Attributes:
        name: of the product.
        total_bytes: its memory.
        used_bytes: of it.
        processes: that use it, as ``pid name``.
        uncorrectable: errors of its memory since the driver was loaded that ECC could not correct; None = no ECC.
        remapping: what its remapped rows ask for: ``failure``, ``pending``, or nothing.
        throttled: reasons for which its clock is held down.
        persistent: whether the driver stays loaded while nobody uses it.
        mig: whether it is divided.
        exclusive: whether only one process may use it.
        celsius: its temperature; None = unknown.
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
    """What a machine's driver knows: its version, the newest CUDA it runs, and the GPUs."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


def inventory(text: str) -> Inventory:
    """Reads what ``nvidia-smi -q -x`` prints.

    Raises:
        ValueError: it is not that.
    """
    try:
        root = xml.fromstring(text)
    except xml.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x printed no XML: {error}") from error
    gpus = tuple(_gpu(node) for node in root.findall("gpu"))
    return Inventory(_text(root, "driver_version"), _text(root, "cuda_version"), gpus)


def _gpu(node: xml.Element) -> Gpu:
    errors = node.find("ecc_errors/volatile")
    counts = [] if errors is None else [_number(_text(errors, tag)) for tag in _UNCORRECTABLE]
    known = [count for count in counts if count is not None]
    throttled = {
        reason
        for section, prefix in (("clocks_event_reasons", "event"), ("clocks_throttle_reasons", "throttle"))
        for reason in _THROTTLES
        if _text(node, f"{section}/clocks_{prefix}_reason_{reason}") == "Active"
    }
    remapping = [what for what in ("failure", "pending") if _text(node, f"remapped_rows/remapped_row_{what}") == "Yes"]
    return Gpu(
        name=_text(node, "product_name"),
        total_bytes=(_number(_text(node, "fb_memory_usage/total")) or 0) * MIB,
        used_bytes=(_number(_text(node, "fb_memory_usage/used")) or 0) * MIB,
        processes=tuple(
            f"{_text(process, 'pid')} {_text(process, 'process_name')}"
            for process in node.findall("processes/process_info")
        ),
        uncorrectable=sum(known) if known else None,
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
    """The number that a text such as ``81559 MiB`` begins with."""
    first = text.split(" ")[0]
    return int(first) if first.isdigit() else None


def links(text: str) -> dict[tuple[int, int], str]:
    """Reads the matrix that ``nvidia-smi topo -m`` prints: how two GPUs are connected, such as ``NV18`` or ``SYS``."""
    rows = [line.split() for line in text.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines() if line.strip()]
    if not rows:
        return {}
    columns = [name for name in rows[0] if name.startswith("GPU") and name[3:].isdigit()]
    found = {}
    for row in rows[1:]:
        if row[0] in columns:
            for other, link in zip(columns, row[1:], strict=False):
                if other != row[0]:
                    found[int(row[0][3:]), int(other[3:])] = link
    return found


def check_gpus(needs: Needs) -> tuple[list[Finding], Inventory | None]:
    """Everything about GPUs; one line where there are none."""
    command = shutil.which("nvidia-smi")
    if command is None or needs.device == "cpu":
        return [_none_here(needs, command)], None
    try:
        there = inventory(_ask(command, "-q", "-x"))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        remedy = "the driver does not answer: look at `nvidia-smi` and `dmesg | grep -i xid`; reboot the node"
        return [Finding("GPUs", Status.FAIL, str(error), remedy)], None
    findings = [count_finding(there, needs), *health_findings(there), driver_finding(there, _torch_cuda())]
    if len(there.gpus) > 1:
        findings.append(_links_finding(command, len(there.gpus)))
    return findings, there


def _none_here(needs: Needs, command: str | None) -> Finding:
    if needs.device == "cuda":
        remedy = "run on a node with GPUs and a driver (a container: --gpus all), or set trainer.device=cpu"
        return Finding("GPUs", Status.FAIL, "no nvidia-smi here, and the run needs GPUs", remedy)
    why = "not asked for" if needs.device == "cpu" else "none (no nvidia-smi)"
    return Finding("GPUs", Status.PASS, f"{why}; computes on CPU")


def count_finding(there: Inventory, needs: Needs) -> Finding:
    """Whether there are as many GPUs as the run needs, all of one kind."""
    names = sorted({gpu.name for gpu in there.gpus})
    found = f"{len(there.gpus)} x {' and '.join(names)}" if names else "none"
    if not there.gpus or len(there.gpus) < (needs.devices or 1):
        remedy = "one may have fallen off the bus: `dmesg | grep -i xid`, reboot; or lower trainer.n_gpus_per_node"
        return Finding("GPUs", Status.FAIL, f"{found}; the run needs {needs.devices or 1} per node", remedy)
    if len(names) > 1:
        return Finding("GPUs", Status.WARN, found, "the slowest sets the pace: use nodes with GPUs of one kind")
    return Finding("GPUs", Status.PASS, f"{found}, {there.gpus[0].total_bytes / 2**30:.0f} GiB each")


def health_findings(there: Inventory) -> Iterator[Finding]:
    """Memory errors, throttling, use by others, and modes."""
    numbered = list(enumerate(there.gpus))
    bad = [f"GPU {i}: {gpu.uncorrectable} uncorrectable errors" for i, gpu in numbered if gpu.uncorrectable]
    bad += [f"GPU {i}: row remapping {gpu.remapping}" for i, gpu in numbered if gpu.remapping == "failure"]
    pending = [f"GPU {i}: row remapping pending" for i, gpu in numbered if gpu.remapping == "pending"]
    state = Status.FAIL if bad else Status.WARN if pending else Status.PASS
    remedy = "reset the GPU or reboot; if it comes back, have it replaced (results may be wrong)" if bad else ""
    yield _of_all("GPU memory", state, bad + pending, "no uncorrectable error", remedy or "reset the GPU when idle")
    hot = [
        f"GPU {i}: {', '.join(gpu.throttled)}" + ("" if gpu.celsius is None else f" at {gpu.celsius} C")
        for i, gpu in numbered
        if gpu.throttled
    ]
    remedy = "look at cooling and power: the slowest GPU sets the pace of all"
    yield _of_all("GPU clocks", Status.WARN if hot else Status.PASS, hot, "not held down", remedy)
    busy = [
        f"GPU {i}: {gpu.used_bytes / 2**30:.1f} GiB" + (f" by {'; '.join(gpu.processes)}" if gpu.processes else "")
        for i, gpu in numbered
        if gpu.used_bytes > IDLE_BYTES
    ]
    remedy = "end what uses them, or wait for it; processes that show no name are in other containers"
    yield _of_all("GPU memory used by others", Status.FAIL if busy else Status.PASS, busy, "none", remedy)
    yield _modes(numbered)


def _modes(numbered: Sequence[tuple[int, Gpu]]) -> Finding:
    divided = [f"GPU {i}: MIG is on" for i, gpu in numbered if gpu.mig]
    exclusive = [f"GPU {i}: only one process may use it" for i, gpu in numbered if gpu.exclusive]
    cold = [f"GPU {i}: persistence mode is off" for i, gpu in numbered if not gpu.persistent]
    remedies = [
        *(["nvidia-smi -mig 0"] if divided else []),
        *(["nvidia-smi -c DEFAULT, for roles share GPUs"] if exclusive else []),
        *(["nvidia-smi -pm 1, or run nvidia-persistenced"] if cold else []),
    ]
    state = Status.FAIL if divided or exclusive else Status.WARN if cold else Status.PASS
    found = "persistence mode on, shared, undivided"
    return _of_all("GPU modes", state, divided + exclusive + cold, found, "; ".join(remedies))


def _of_all(name: str, state: Status, wrong: Sequence[str], right: str, remedy: str) -> Finding:
    return Finding(name, state, "; ".join(wrong) or right, remedy if wrong else "")


def driver_finding(there: Inventory, torch_cuda: str | None) -> Finding:
    """Whether the driver runs the CUDA that torch was built with: one of the same major version does."""
    found = f"driver {there.driver} (CUDA up to {there.cuda}), torch built for {torch_cuda or 'CPU only'}"
    if torch_cuda is None:
        remedy = "install a CUDA build of torch: the CPU build sees no GPU"
        return Finding("CUDA", Status.FAIL, found, remedy)
    have, want = (
        tuple(int(part) for part in text.split(".")[:2] if part.isdigit()) for text in (there.cuda, torch_cuda)
    )
    if have[:1] < want[:1]:
        return Finding(
            "CUDA", Status.FAIL, found, f"update the driver to one for CUDA {want[0]}, or take another torch"
        )
    if have < want:
        remedy = "works, but kernels compiled at run time (Triton) may need a newer driver"
        return Finding("CUDA", Status.WARN, found, remedy)
    return Finding("CUDA", Status.PASS, found)


def links_finding(found: Mapping[tuple[int, int], str]) -> Finding:
    """Whether all GPUs of a node are connected by NVLink."""
    kinds = sorted(set(found.values()))
    slow = {pair: link for pair, link in found.items() if not link.startswith("NV")}
    if not slow:
        return Finding("GPU links", Status.PASS, f"NVLink between all ({', '.join(kinds)})")
    some = ", ".join(f"{a}-{b} {link}" for (a, b), link in sorted(slow.items()) if a < b)
    remedy = (
        "tensor parallelism needs NVLink to be fast: keep tensor_model_parallel_size within what NVLink connects, and "
        "on a machine that has NVLink look at `nvidia-smi nvlink -s` and the fabric manager"
    )
    return Finding("GPU links", Status.WARN, f"no NVLink: {some}", remedy)


def _links_finding(command: str, count: int) -> Finding:
    try:
        found = links(_ask(command, "topo", "-m"))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("GPU links", Status.WARN, f"unknown: {error}", "look at `nvidia-smi topo -m`")
    if len(found) < count * (count - 1):
        return Finding("GPU links", Status.WARN, "unknown", "look at `nvidia-smi topo -m`")
    return links_finding(found)


def _ask(command: str, *arguments: str) -> str:
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise subprocess.SubprocessError(f"nvidia-smi {' '.join(arguments)} ended with {done.returncode}: {text}")
    return done.stdout


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda
