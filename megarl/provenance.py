"""Which software wrote something, where, and from which state of the source."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import megarl

_PACKAGES = ("torch", "megatron-core", "transformers", "ray")
_MORE_PACKAGES = ("sglang", "transformer-engine", "flash-attn", "hydra-core", "tensordict", "numpy")
_GIT_SECONDS = 5.0


def installed_versions(also: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions of what computes here, by name; what is not installed is absent.

    Args:
        also: packages beyond those that a checkpoint depends on.
    """
    found = {"megarl": megarl.__version__, "python": platform.python_version()}
    for package in _PACKAGES + also:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def run_facts() -> dict[str, Any]:
    """What a run can say of the software and the machine it starts on, as plain values.

    Returns:
        ``started`` (ISO 8601, UTC), ``versions`` by package, ``machine``, and under ``git`` the state of megarl's
        checkout and, where it is another, of the one that the run was started in.
    """
    here, work = (git_state(folder) for folder in (Path(megarl.__file__).parent, Path.cwd()))
    states = {"megarl": here, "working folder": work}
    if here is not None and work == here:
        del states["working folder"]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(_MORE_PACKAGES),
        "machine": {"host": platform.node(), "system": platform.platform(), "cpus": os.cpu_count()},
        "git": {name: state for name, state in states.items() if state is not None},
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """``commit``, ``branch`` and ``changed`` (files that differ from the commit) of the checkout that a folder is in.

    None where it is in none, where git does not know the folder's own files (an environment inside somebody's
    checkout), or where there is no git.
    """
    if folder.name == "megarl" and not _git(folder, "ls-files", "__init__.py"):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    names = [line[3:] for line in (changed or "").split("\n") if line]
    return {
        "commit": commit.strip(),
        "branch": (_git(folder, "branch", "--show-current") or "").strip(),
        "changed": names,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, is missing or takes too long."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
