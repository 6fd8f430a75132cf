"""Versions that fit together.

Two sources say so: combinations that megarl's whole test suite ran with, below as data, and the packages' own
requirements of each other, read from what is installed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import NamedTuple

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from megarl.doctor.node.finding import Finding, Status
from megarl.doctor.node.needs import Needs

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
"""What computes, or moves what is computed: other packages' versions hardly matter to results."""

REQUIRED = ("torch", "megarl", "megatron-core", "ray", "transformers")


class Combination(NamedTuple):
    """Versions with which all tests passed.

    Attributes:
        name: how the table calls it.
        python: major and minor version.
        versions: by package; one that is not named was not installed.
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


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of the packages that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_versions(needs: Needs) -> list[Finding]:
    """What is installed: whether anything is missing, contradicts another's requirement, or was never tested."""
    found = installed((*PACKAGES, "megarl"))
    if missing := [package for package in REQUIRED if package not in found]:
        remedy = "install megarl with its pins: pip install -c launch/constraints.txt megarl"
        return [Finding("packages", Status.FAIL, f"not installed: {', '.join(missing)}", remedy)]
    return [requirements(found, _requires), known_combination(found)]


def requirements(found: Mapping[str, str], requires: Callable[[str], list[str]]) -> Finding:
    """Whether each installed package has the versions of the others that it asks for.

    Args:
        found: installed versions by package.
        requires: requirements of a package, as its metadata has them.
    """
    wrong: list[str] = []
    exempt: list[str] = []
    for package in found:
        for requirement in _parsed(requires(package)):
            have = found.get(requirement.name.lower().replace("_", "-"))
            if have is None or requirement.specifier.contains(Version(have), prereleases=True):
                continue
            text = f"{package} {found[package]} asks for {requirement.name}{requirement.specifier}, there is {have}"
            (exempt if package == "sglang" and _tested(found) else wrong).append(text)
    if wrong:
        remedy = "install versions that fit: pip install -c launch/constraints.txt, or those that the package asks for"
        return Finding("requirements", Status.FAIL, "; ".join(wrong), remedy)
    if exempt:  # what SGLang pins for its CUDA kernels, which a tested combination does without
        return Finding("requirements", Status.PASS, f"tested all the same: {'; '.join(exempt)}")
    return Finding("requirements", Status.PASS, "packages have what they ask of each other")


def known_combination(found: Mapping[str, str]) -> Finding:
    """Whether the versions are ones that were tested together; if not, how far the nearest such are."""
    told = ", ".join(f"{name} {found[name]}" for name in ("python", *PACKAGES) if name in found)
    if tested := _tested(found):
        return Finding("versions", Status.PASS, f"tested together ({tested.name}): {told}")
    nearest = min(KNOWN_GOOD, key=lambda combination: len(distance(found, combination)))
    remedy = f"not tested together; '{nearest.name}' has {', '.join(distance(found, nearest))}"
    return Finding("versions", Status.WARN, told, remedy)


def distance(found: Mapping[str, str], combination: Combination) -> list[str]:
    """What a combination has otherwise: versions by package, its Python, and packages that it has not."""
    other = [f"{name} {want}" for name, want in combination.versions.items() if _plain(found.get(name)) != want]
    if ".".join(found["python"].split(".")[:2]) != combination.python:
        other.append(f"python {combination.python}")
    return other + [f"no {name}" for name in found if name in PACKAGES and name not in combination.versions]


def _tested(found: Mapping[str, str]) -> Combination | None:
    return next((combination for combination in KNOWN_GOOD if not distance(found, combination)), None)


def _plain(text: str | None) -> str | None:
    """A version without its build, such as ``+cpu``."""
    return None if text is None else text.split("+")[0]


def _requires(package: str) -> list[str]:
    try:
        return list(distribution(package).requires or [])
    except PackageNotFoundError:
        return []


def _parsed(texts: list[str]) -> list[Requirement]:
    """Requirements that hold here and belong to no extra."""
    parsed, here = [], {**default_environment(), "extra": ""}
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({k: str(v) for k, v in here.items()}):
            parsed.append(requirement)
    return parsed
