"""Which software wrote something."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import megarl

_PACKAGES = ("torch", "megatron-core", "transformers", "ray")


def installed_versions() -> dict[str, str]:
    """Versions of what computes here, by name; what is not installed is absent."""
    found = {"megarl": megarl.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
