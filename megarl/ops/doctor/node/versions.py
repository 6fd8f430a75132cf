"""Checks of package versions.

Two sources: the combinations that the whole test suite ran with (data in this module), and the requirements in the
metadata of the installed packages.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
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
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "tensordict",
    "numpy",
    "hydra-core",
    "omegaconf",
)
"""Packages that compute or move tensors; the versions of other packages hardly change results."""

REQUIRED = ("torch", "megarl", "megatron-core", "ray", "transformers")


class Combination(NamedTuple):
    """Versions with which all tests passed.

    Attributes:
        name: name in the table.
        python: major and minor version.
        versions: by package; packages without an entry were not installed.
    """

    name: str
    python: str
    versions: Mapping[str, str]


_COMMON = {
    "torch": "2.13.0",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "tensordict": "0.15.3",
    "numpy": "2.4.6",
    "hydra-core": "1.3.8",
    "omegaconf": "2.3.1",
}
KNOWN_GOOD = (
    Combination("CPU, Python 3.12", "3.12", {**_COMMON, "megatron-core": "0.19.2"}),
    Combination("CPU, Python 3.11", "3.11", {**_COMMON, "megatron-core": "0.16.1"}),
    Combination("CPU, Python 3.12, SGLang", "3.12", {**_COMMON, "megatron-core": "0.19.2", "sglang": "0.5.23"}),
    Combination("CPU, Python 3.11, SGLang", "3.11", {**_COMMON, "megatron-core": "0.16.1", "sglang": "0.5.23"}),
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
    """Check the installed packages: missing ones, conflicting requirements, untested combinations."""
    versions = package_versions((*PACKAGES, "megarl"))
    if missing := [package for package in REQUIRED if package not in versions]:
        remedy = f"install megarl with its pins: {install_command('gpu')}"
        return [CheckResult("packages", Status.FAIL, f"not installed: {', '.join(missing)}", remedy)]
    return [check_requirements(versions, _requires), check_combination(versions)]


def check_requirements(versions: Mapping[str, str], requires: Callable[[str], list[str]]) -> CheckResult:
    """Check the requirements of each installed package against the installed versions.

    Args:
        versions: installed versions by package.
        requires: returns the requirements of a package from its metadata.
    """
    conflicts: list[str] = []
    exempt: list[str] = []
    for package in versions:
        for requirement in _parsed(requires(package)):
            present = versions.get(requirement.name.lower().replace("_", "-"))
            if present is None or requirement.specifier.contains(Version(present), prereleases=True):
                continue
            requirement_text = f"{requirement.name}{requirement.specifier}"
            text = f"{package} {versions[package]} requires {requirement_text}, installed is {present}"
            (exempt if package == "sglang" and _tested(versions) else conflicts).append(text)
    if conflicts:
        remedy = "install matching versions: pip install -c launch/constraints.txt, or the versions that it requires"
        return CheckResult("requirements", Status.FAIL, "; ".join(conflicts), remedy)
    if exempt:  # pins of SGLang for its CUDA kernels; the tested CPU combination does not use them
        return CheckResult("requirements", Status.PASS, f"tested nevertheless: {'; '.join(exempt)}")
    return CheckResult("requirements", Status.PASS, "all requirements between packages are met")


def check_combination(versions: Mapping[str, str]) -> CheckResult:
    """Check that the versions were tested together; otherwise name the nearest tested combination."""
    text = ", ".join(f"{name} {versions[name]}" for name in ("python", *PACKAGES) if name in versions)
    if tested := _tested(versions):
        return CheckResult("versions", Status.PASS, f"tested together ({tested.name}): {text}")
    nearest = min(KNOWN_GOOD, key=lambda combination: len(version_differences(versions, combination)))
    remedy = f"not tested together; '{nearest.name}' has {', '.join(version_differences(versions, nearest))}"
    return CheckResult("versions", Status.WARN, text, remedy)


def version_differences(versions: Mapping[str, str], combination: Combination) -> list[str]:
    """List the differences of a combination: versions of packages, Python, and packages that it lacks."""
    differences = [
        f"{name} {tested}" for name, tested in combination.versions.items() if _release(versions.get(name)) != tested
    ]
    if ".".join(versions["python"].split(".")[:2]) != combination.python:
        differences.append(f"python {combination.python}")
    return differences + [f"no {name}" for name in versions if name in PACKAGES and name not in combination.versions]


def _tested(versions: Mapping[str, str]) -> Combination | None:
    return next((combination for combination in KNOWN_GOOD if not version_differences(versions, combination)), None)


def _release(text: str | None) -> str | None:
    """Strip the build from a version, such as ``+cpu``."""
    return None if text is None else text.split("+")[0]


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
