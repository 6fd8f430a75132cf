"""The ``megarl`` command: jobs, which run from a configuration (``train``, ``sft``, ...), and tools around them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megarl.base.commands import EXIT_BAD_INPUT, exit_code
from megarl.base.formatting import table_lines
from megarl.base.signals import signals_exit_at_once, signals_exit_in_order
from megarl.base.version import __version__
from megarl.config.problems import nearest_keys
from megarl.ops.jobs.command import run_job
from megarl.ops.jobs.table import JOBS


class Command(NamedTuple):
    """A command that is not a run. Its module is imported when the command is used."""

    module: str  # has main(argv), which returns the exit code
    doc: str


COMMANDS = {
    "convert": Command("megarl.convert.command", "checkpoints to and from Hugging Face; inspect, verify"),
    "doctor": Command("megarl.ops.doctor.command", "checks of machines before a run; causes of log-prob differences"),
    "report": Command("megarl.ops.report.command", "the HTML report of a run, or a comparison of several"),
    "timeline": Command("megarl.ops.timeline.command", "what a run's timeline says: busy shares, phases, gaps"),
    "launch": Command("megarl.ops.launch.command", "a job on a cluster: by SLURM, ssh, or on this machine"),
    "scale": Command("megarl.ops.scale", "the number of elastic rollout replicas of a run in progress"),
    "plan": Command("megarl.ops.plan.command", "memory and limits of a configuration before it runs; best layouts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``megarl`` command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in JOBS:
        return run_job(name, arguments[1:])
    if name in COMMANDS:
        return _run_command(COMMANDS[name], arguments[1:])
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"megarl {__version__}")
        return 0
    print(_unknown(name) if name else _usage(), file=sys.stderr)
    return EXIT_BAD_INPUT


def _run_command(command: Command, arguments: Sequence[str]) -> int:
    with signals_exit_at_once():
        module = importlib.import_module(command.module)

    def action() -> int:
        with signals_exit_in_order():
            code: int = module.main(arguments)
            return code

    return exit_code(action)


def _unknown(name: str) -> str:
    nearest = " or ".join(nearest_keys(name, [*JOBS, *COMMANDS]))
    guess = f" Did you mean {nearest}?" if nearest else ""
    return f"megarl {name}: unknown command.{guess} megarl --help lists all commands."


def _usage() -> str:
    docs = {name: row.doc for table in (JOBS, COMMANDS) for name, row in table.items()}
    lines = dict(zip(docs, table_lines(docs.items(), indent="  "), strict=True))
    return "\n".join(
        [
            "usage: megarl JOB [options] [KEY=VALUE ...]",
            "       megarl COMMAND ...",
            "",
            "jobs, each with a YAML configuration:",
            *(lines[name] for name in JOBS),
            "",
            "commands:",
            *(lines[name] for name in COMMANDS),
            "",
            "megarl NAME --help explains each.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
