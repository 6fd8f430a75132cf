"""The bench of a stage: device, sizes, scratch folder, and the record of its checks."""

from __future__ import annotations

import logging
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.base.errors import ConfigError
from megarl.base.provenance import installed_versions
from megarl.ops.acceptance.results import Result, StageReport, Verdict

if TYPE_CHECKING:
    from megarl.ops.plan.hardware import Hardware

logger = logging.getLogger(__name__)

KNOWN_GPUS = {
    r"\bH100 80GB HBM3": "h100",  # the SXM5 card; those for PCIe have other peaks
    r"\bH200\b": "h200",
    r"\bB200\b": "b200",
    r"\bA100": "a100",
}
"""Files of ``configs/hardware`` by pattern of the device's name; peaks of other devices are unknown."""


class MissingError(Exception):
    """A package or file is absent; once it is installed, the check can pass."""


class UnsupportedError(Exception):
    """This device cannot run the check."""


class Bench:
    """Device, sizes and scratch folder of a stage, and the record of its checks.

    Args:
        report: results so far; checks that passed are not repeated.
        pattern: regular expression of the checks to run; the others remain for a later run. None = all.
    """

    def __init__(
        self,
        report: StageReport,
        folder: Path,
        device: str,
        show: Callable[[Result], None],
        pattern: str | None = None,
    ) -> None:
        self.report = replace(report, facts=facts(device), is_complete=False, left_out=0)
        self.folder = folder
        self.device = torch.device(device)
        self._show = show
        self._pattern = re.compile(pattern or "")
        self._started = time.monotonic()

    @property
    def is_tiny(self) -> bool:
        """Whether models and lengths are tiny."""
        return self.report.scale == "tiny"

    @property
    def scratch(self) -> Path:
        """Folder for models and data of this stage; kept for a resumed run."""
        folder = self.folder / "scratch" / self.report.stage
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def hardware(self) -> Hardware | None:
        """The device's file of ``configs/hardware``; None for a GPU without one."""
        from megarl.ops.plan.hardware import read_hardware  # imports Hydra, which not every stage needs

        if self.device.type == "cpu":
            return read_hardware("cpu")
        name = torch.cuda.get_device_properties(0).name
        file = next((file for pattern, file in KNOWN_GPUS.items() if re.search(pattern, name)), None)
        return None if file is None else read_hardware(file)

    @property
    def memory_bytes(self) -> float:
        """Memory of the device."""
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(0).total_memory)
        assert self.hardware is not None
        return self.hardware.memory_bytes

    @property
    def peak_flops(self) -> float | None:
        """Peak of dense bfloat16 products in FLOP/s; None if it is unknown."""
        return None if self.hardware is None else self.hardware.peak_flops("bfloat16")

    def check(self, name: str, action: Callable[[], Result]) -> None:
        """Run a check unless it passed before, and record its result; an exception is a failed check.

        Args:
            name: name of the check; the result's is empty.
            action: returns the result; raises :class:`MissingError` for an absent package, and
                :class:`UnsupportedError` if the device lacks what the check measures.
        """
        before = next((result for result in self.report.results if result.check == name), None)
        if before is not None and before.outcome in (Verdict.OK, Verdict.INFO):
            return
        if not self._pattern.search(name):
            self.report = replace(self.report, left_out=self.report.left_out + 1)
            return
        try:
            result = replace(action(), check=name)
        except (MissingError, ModuleNotFoundError) as error:
            result = Result(name, Verdict.MISSING, note=str(error))
        except UnsupportedError as error:
            result = Result(name, Verdict.INFO, note=str(error))
        except Exception as error:
            logger.exception("%s failed", name)
            text = " ".join(str(error).split())
            result = Result(name, Verdict.FAIL, note=f"{type(error).__name__}: {text[:300]}")
        self.report = replace(self.report.with_result(result), seconds=time.monotonic() - self._started)
        self.report.write(self.folder)
        self._show(result)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def finish(self) -> None:
        """Mark the stage as complete."""
        self.report = replace(self.report, is_complete=True, seconds=time.monotonic() - self._started)
        self.report.write(self.folder)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], repeats: int = 5) -> float:
        """Return the median seconds of an action; the first run does not count."""
        action()
        taken = []
        for _ in range(repeats):
            self.synchronize()
            started = time.perf_counter()
            action()
            self.synchronize()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def speed(self, value: float, target: float | None, unit: str, note: str = "") -> Result:
        """Report a speed; below its target it is no failure. Tiny sizes and unknown devices (None) have no target."""
        if self.is_tiny or target is None:
            return Result("", Verdict.INFO, value, unit, note=note)
        outcome = Verdict.OK if value >= target else Verdict.BELOW
        return Result("", outcome, value, unit, f"at least {target:.3g}", note)


def within(value: float, limit: float, unit: str = "", note: str = "") -> Result:
    """Check a number against an upper limit; NaN fails."""
    outcome = Verdict.OK if value <= limit else Verdict.FAIL
    return Result("", outcome, value, unit, f"at most {limit:.3g}", note)


def near_plan(value: float, plan: float, unit: str, tolerance: float) -> Result:
    """Compare a measurement with the estimate of ``megarl plan``."""
    difference = value / plan - 1
    outcome = Verdict.OK if abs(difference) <= tolerance else Verdict.BELOW
    return Result("", outcome, value, unit, f"plan {plan:.3g} ± {tolerance:.0%}", f"{difference:+.0%}")


def facts(device: str) -> dict[str, str]:
    """Return date, device and versions of a report."""
    values = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        values |= {
            "device": f"{properties.name}, {properties.total_memory / 1e9:.0f} GB",
            "CUDA": str(torch.version.cuda),
        }
    else:
        values["device"] = f"CPU, {os.cpu_count()} cores"
    values |= installed_versions(("sglang", "transformer-engine", "flash-attn"))
    values["torch"] = torch.__version__
    return values


def needs_package(package: str) -> None:
    """Raise :class:`MissingError` unless a package is installed."""
    try:
        version(package)
    except PackageNotFoundError:
        raise MissingError(f"{package} is not installed") from None


def checkout() -> Path:
    """Return the root of the checkout that megarl is imported from.

    Raises:
        MissingError: megarl is installed without its checkout.
    """
    root = Path(__file__).parents[3]
    if not (root / "tools" / "make_arithmetic.py").is_file():
        raise MissingError(f"{root} is not a checkout of megarl: tools/ and tests/ are needed")
    return root


def choose_device(name: str) -> str:
    """Return ``cuda`` or ``cpu`` for ``auto`` or one of them.

    Raises:
        ConfigError: ``cuda`` without a GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            "--device cuda: torch finds no CUDA device; use --device cpu for the tiny sizes", code="acceptance.no-cuda"
        )
    return "cuda" if available and name != "cpu" else "cpu"
