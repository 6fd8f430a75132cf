"""The command that started this process, for messages that name a command to run next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "megarl"
_MULTIRUN = ("-m", "--multirun")


def command_with(overrides: Sequence[str]) -> str:
    """Return the command of this job with further overrides, ready for a shell.

    Args:
        overrides: ``KEY=VALUE``; they replace earlier ones.

    Returns:
        ``python -m megarl.train ...``; "the same command" with the overrides, if the process was started by a launcher,
        a sweep or another program.
    """
    words = _job_command(sys.orig_argv)
    if words is None:
        return f"the same command with {' '.join(overrides)}" if overrides else "the same command"
    return shlex.join([*words, *overrides])


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
