"""Provenance of a run or checkpoint: package versions, machine, git state, and the command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megarl.base.redaction import redact_words
from megarl.base.version import __version__

_PACKAGES = ("torch", "megatron-core", "transformers", "ray")
_MORE_PACKAGES = ("sglang", "transformer-engine", "flash-attn", "hydra-core", "numpy")
_GIT_SECONDS = 5.0
_GPU_STACKS = {"gpu": "embedded", "sglang": "sglang"}  # by extra
PROGRAM = "megarl"
_MULTIRUN = ("-m", "--multirun")


def install_command(extra: str) -> str:
    """Return the command that installs an extra of megarl, which is installed from its checkout only.

    Args:
        extra: name in ``pyproject.toml``; the extras for GPUs need a stack of ``launch/environment.sh``.
    """
    if extra in _GPU_STACKS:
        return f"in megarl's checkout, source launch/environment.sh && ensure_gpu_environment {_GPU_STACKS[extra]}"
    return f"in megarl's checkout, pip install -c megarl/pins/default.txt -e '.[{extra}]'"


def installed_versions(also: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the versions of Python, megarl and its main packages; missing packages are skipped."""
    versions = {"megarl": __version__, "python": platform.python_version()}
    for package in _PACKAGES + also:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def run_facts() -> dict[str, Any]:
    """Describe the software and the machine of a run, as plain values.

    Returns:
        ``started`` (ISO 8601, UTC), ``versions`` by package, ``machine``, and ``git``: the state of megarl's checkout
        and, if it differs, of the checkout with the working folder.
    """
    package, work = (git_state(folder) for folder in (Path(__file__).parents[1], Path.cwd()))
    states = {"megarl": package, "working folder": work}
    if package is not None and work == package:
        del states["working folder"]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(_MORE_PACKAGES),
        "machine": {"host": platform.node(), "system": platform.platform(), "cpus": os.cpu_count()},
        "git": {name: state for name, state in states.items() if state is not None},
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return ``commit``, ``branch`` and ``changed`` (modified files) of the checkout that contains a folder.

    Returns:
        None if there is no checkout or no git, or if git does not track the folder (such as an environment inside
        another checkout).
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
    """Run git; return its output, or None if it fails, is missing or takes too long."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def command_with(overrides: Sequence[str]) -> str:
    """Return the command of this job with further overrides, ready for a shell; secrets in it are redacted.

    Args:
        overrides: ``KEY=VALUE``; they replace earlier ones.

    Returns:
        ``megarl train ...``; "the same command" with the overrides, if the process was started by a launcher,
        a sweep or another program.
    """
    words = _job_command(sys.orig_argv)
    if words is None:
        return f"the same command with {' '.join(overrides)}" if overrides else "the same command"
    return shlex.join(redact_words([*words, *overrides]))


def _job_command(argv: Sequence[str]) -> list[str] | None:
    if os.environ.get("RAY_ADDRESS"):
        return None  # a launcher has started the cluster, and restarts it
    python = Path(argv[0]).name if argv else ""
    for position, word in enumerate(argv[1:], start=1):
        arguments = list(argv[position + 1 :])
        if word == "-m" and arguments and arguments[0].split(".")[0] == PROGRAM:
            return None if _is_sweep(arguments[1:]) else [python, *argv[1:]]
        if Path(word).name == PROGRAM:
            return None if _is_sweep(arguments) else [PROGRAM, *arguments]
        if not word.startswith("-"):
            return None
    return None


def _is_sweep(arguments: Sequence[str]) -> bool:
    return any(word in _MULTIRUN for word in arguments)
