"""Checks of package versions.

Two sources: the combinations in the constraint files of ``megarl/pins/``, which ``launch/lock.sh`` writes, and the
requirements in the metadata of the installed packages.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence, Set
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import NamedTuple

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from megarl.base.provenance import install_command
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "torch-memory-saver",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "hydra-core",
    "omegaconf",
)
"""Packages that compute or move tensors; the versions of other packages hardly change results."""

REQUIRED = ("torch", "megarl-llm", "megatron-core", "ray", "transformers")

_PINS = Path(__file__).parents[3] / "pins"
_GPU_PACKAGES = frozenset({"transformer-engine", "sglang-kernel", "flashinfer-python", "torch-memory-saver"})
_PIN = re.compile(r'^([\w.-]+)==([^\s;]+)(?: ; python_version (<|>=) "3\.12")?$', re.MULTILINE)


class Combination(NamedTuple):
    """Versions that belong together."""

    name: str  # name in the table
    python: str  # major and minor version
    file: str  # the constraint file with these versions and those of all other packages
    versions: Mapping[str, str]  # by package; packages without an entry are not installed
    tested: bool = True  # all tests passed with them; else chosen by the packages' metadata

    def __str__(self) -> str:
        return f"{self.name}; {self.file}"


def _combination(name: str, python: str, stack: str, without: Set[str], tested: bool = True) -> Combination:
    """Read the versions of ``PACKAGES`` in a constraint file for a version of Python."""
    text = (_PINS / f"{stack}.txt").read_text(encoding="utf-8")
    excluded = ">=" if python == "3.11" else "<"
    pins = {package: pin for package, pin, sign in _PIN.findall(text) if sign != excluded}
    versions = {package: pins[package] for package in PACKAGES if package in pins and package not in without}
    return Combination(name, python, f"megarl/pins/{stack}.txt", versions, tested)


GPU_STACKS = (
    _combination("GPU, SGLang", "3.12", "sglang", frozenset(), tested=False),
    _combination("GPU, embedded engine", "3.12", "default", frozenset(), tested=False),
)
_CPU_STACKS = tuple(
    _combination(f"CPU, Python {python}", python, "default", _GPU_PACKAGES) for python in ("3.12", "3.11")
)
_SGLANG = GPU_STACKS[0].versions["sglang"]
CPU_STACKS = (
    *_CPU_STACKS,
    *(
        each._replace(name=f"{each.name}, SGLang", versions={**each.versions, "sglang": _SGLANG})
        for each in _CPU_STACKS
    ),
)


def package_versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def check_versions(needs: Needs) -> list[CheckResult]:
    """Check the installed packages: missing ones, conflicting requirements, differences from the constraint files."""
    versions = package_versions((*PACKAGES, "megarl-llm"))
    stacks = stacks_of(versions, needs.device)
    if missing := [package for package in REQUIRED if package not in versions]:
        remedy = f"install megarl with its pins: {install_command('dev' if stacks is CPU_STACKS else 'gpu')}"
        return [CheckResult("packages", Status.FAIL, f"not installed: {', '.join(missing)}", remedy)]
    return [check_requirements(versions, _requires, stacks), check_combination(versions, stacks)]


def stacks_of(versions: Mapping[str, str], device: str) -> tuple[Combination, ...]:
    """Return the combinations to compare with: those of GPUs for a run on GPUs or with packages for GPUs only."""
    return GPU_STACKS if device == "cuda" or _GPU_PACKAGES & versions.keys() else CPU_STACKS


def check_requirements(
    versions: Mapping[str, str], requires: Callable[[str], list[str]], stacks: Sequence[Combination] = CPU_STACKS
) -> CheckResult:
    """Check what each package ``requires`` in its metadata; the remedy names the nearest combination's file."""
    conflicts: list[str] = []
    exempt: list[str] = []
    is_tested = any(not version_differences(versions, combination) for combination in CPU_STACKS)
    for package in versions:
        for requirement in _parsed(requires(package)):
            present = versions.get(requirement.name.lower().replace("_", "-"))
            if present is None or requirement.specifier.contains(Version(present), prereleases=True):
                continue
            requirement_text = f"{requirement.name}{requirement.specifier}"
            text = f"{package} {versions[package]} requires {requirement_text}, installed is {present}"
            (exempt if package == "sglang" and is_tested else conflicts).append(text)
    if conflicts:
        file = _nearest(versions, stacks).file
        remedy = f"install matching versions: pip install -c {file}, or the versions that it requires"
        return CheckResult("requirements", Status.FAIL, "; ".join(conflicts), remedy)
    if exempt:  # pins of SGLang for its CUDA kernels; the tested CPU combination does not use them
        return CheckResult("requirements", Status.PASS, f"tested nevertheless: {'; '.join(exempt)}")
    return CheckResult("requirements", Status.PASS, "all requirements between packages are met")


def check_combination(versions: Mapping[str, str], stacks: Sequence[Combination] = CPU_STACKS) -> CheckResult:
    """Check that the versions are those of a constraint file; otherwise name the nearest file and the differences."""
    text = ", ".join(f"{name} {versions[name]}" for name in ("python", *PACKAGES) if name in versions)
    nearest = _nearest(versions, stacks)
    differences = version_differences(versions, nearest)
    if not differences:
        state = "tested together" if nearest.tested else "chosen by requirements, not yet run together"
        return CheckResult("versions", Status.PASS, f"{state} ({nearest}): {text}")
    return CheckResult("versions", Status.WARN, text, f"not tested together; '{nearest}' has {', '.join(differences)}")


def version_differences(versions: Mapping[str, str], combination: Combination) -> list[str]:
    """List the differences of a combination: versions of packages, Python, and packages that it lacks."""
    releases = {name: text.split("+")[0] for name, text in versions.items()}  # without the build, such as +cpu
    pins = combination.versions.items()
    differences = [f"{name} {tested}" for name, tested in pins if releases.get(name) != tested]
    if ".".join(versions["python"].split(".")[:2]) != combination.python:
        differences.append(f"python {combination.python}")
    return differences + [f"no {name}" for name in versions if name in PACKAGES and name not in combination.versions]


def _nearest(versions: Mapping[str, str], stacks: Sequence[Combination]) -> Combination:
    return min(stacks, key=lambda combination: len(version_differences(versions, combination)))


def _requires(package: str) -> list[str]:
    try:
        return list(distribution(package).requires or [])
    except PackageNotFoundError:
        return []


def _parsed(texts: list[str]) -> list[Requirement]:
    """Parse requirements; drop those of extras and of other platforms."""
    parsed, environment = [], {**default_environment(), "extra": ""}
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({k: str(v) for k, v in environment.items()}):
            parsed.append(requirement)
    return parsed
