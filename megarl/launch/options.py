"""The launcher's own command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megarl.cli import JOBS
from megarl.config.problems import nearest_keys
from megarl.errors import ConfigError
from megarl.launch.job import JOB_NAMES, is_job
from megarl.launch.reach import current_folder
from megarl.launch.settings import FIRST_PORT, WORKER_PORTS

PLACES = ("auto", "local", "ssh", "slurm", "sbatch", "kubernetes")
_EPILOG = f"""\
A job is {JOB_NAMES} with its arguments, as after `megarl`; or, after `--`, any command that
joins the Ray cluster named by RAY_ADDRESS. How many nodes with how many devices is in the configuration
(trainer.nnodes, trainer.n_gpus_per_node). Everything else is in docs/launch.md."""
_WORKER_PORTS_HELP = f"ports of Ray's workers ({'-'.join(map(str, WORKER_PORTS))})"
_FOR_COMMANDS = ("nodes", "devices_per_node", "device")
_PLACES_OF = {
    **dict.fromkeys(("image", "namespace", "pod_cpus", "pod_memory", "pod_shared_memory"), ("kubernetes",)),
    **dict.fromkeys(("volume", "secret", "node_label"), ("kubernetes",)),
    "sbatch": ("sbatch",),
    "srun": ("slurm", "sbatch"),
    "ssh": ("ssh",),
}
"""Options that only some places have a use for."""


def split_job(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """The launcher's arguments, the job's (from its name on, or after ``--``), and whether that is one of megarl's.

    Raises:
        ConfigError: there is no job.
    """
    takes_value, skip = _options_with_value(), False
    for index, word in enumerate(argv):
        if skip:
            skip = False
        elif word == "--":
            if argv[index + 1 :]:
                return list(argv[:index]), list(argv[index + 1 :]), False
            break
        elif word.startswith("-"):
            skip = word in takes_value
        elif is_job(word):
            return list(argv[:index]), list(argv[index:]), True
        else:
            nearest = " or ".join(nearest_keys(word, JOBS))
            guess = f"; did you mean {nearest}?" if nearest else "."
            raise ConfigError(f"megarl launch: {word!r} is no job{guess} There are {JOB_NAMES}")
    raise ConfigError("megarl launch: no job is named, such as train; megarl launch --help")


def check_use(options: argparse.Namespace, place: str, *, is_megarl: bool) -> None:
    """Whether all options that are given do something.

    Args:
        options: the launcher's.
        place: where it launches.
        is_megarl: whether it is a job of megarl's, whose configuration says what it needs.

    Raises:
        ConfigError: one does nothing.
    """
    default = parser().get_default
    given = [name for name in (*_PLACES_OF, *_FOR_COMMANDS) if getattr(options, name) != default(name)]
    for name in given:
        places, option = _PLACES_OF.get(name, PLACES), f"--{name.replace('_', '-')}"
        if place not in places:
            raise ConfigError(f"{option} is for --on {' and '.join(places)}; this is --on {place}")
        if is_megarl and name in _FOR_COMMANDS:
            raise ConfigError(
                f"{option} is for a command after --; of a job set trainer.nnodes, trainer.n_gpus_per_node or "
                "trainer.device"
            )


def parser() -> argparse.ArgumentParser:
    """Of the launcher's own options."""
    made = argparse.ArgumentParser(
        prog="megarl launch",
        usage="megarl launch [options] JOB [KEY=VALUE ...]\n       megarl launch [options] -- COMMAND ...",
        description="Starts a Ray cluster, runs a job on it, and takes down what it started.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    made.add_argument(
        "--on",
        choices=PLACES,
        default="auto",
        help="auto: ssh with --hosts, slurm in an allocation, else local",
    )
    made.add_argument("--hosts", help="for ssh: host1,host2,... or a file with one per line; the first is the head")
    made.add_argument("--max-restarts", type=_count, default=0, metavar="N", help="attempts after one that failed (0)")
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}
    made.add_argument("--restart-delay", default=10.0, help="seconds before a restart; doubles (10)", **seconds)
    made.add_argument("--start-timeout", default=300.0, help="seconds until all nodes must be there (300)", **seconds)
    made.add_argument(
        "--grace", default=600.0, help="seconds for the driver to save and end after Ctrl-C or SIGTERM (600)", **seconds
    )
    made.add_argument("--no-doctor", action="store_true", help="do not check the nodes before the job starts")
    _add_node_options(made)
    _add_scheduler_options(made)
    return made


def _add_node_options(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("the nodes")
    group.add_argument("--nodes", type=_count, help="of a command after --: how many machines")
    group.add_argument("--devices-per-node", type=_count, help="of a command after --: how many on each")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of a command after --")
    group.add_argument("--python", default=sys.executable, help="interpreter on the nodes; default: this one's path")
    group.add_argument("--workdir", default=current_folder(), help="working directory on the nodes; default: this one")
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="variable for the nodes; may be repeated"
    )
    group.add_argument("--wrap", default="", help="put before Python on each node, to enter a container")
    group.add_argument("--interface", default="", help="network interface whose address each node uses, such as ib0")
    group.add_argument("--head-address", default="", help="address of the head, where it is not found out rightly")
    group.add_argument("--port", type=_count, default=FIRST_PORT, help=f"first of a node's nine ports ({FIRST_PORT})")
    group.add_argument("--worker-ports", type=_range, default=WORKER_PORTS, metavar="LOW-HIGH", help=_WORKER_PORTS_HELP)
    group.add_argument("--object-store-gb", type=float, help="GiB of shared memory for Ray's objects, each node")


def _add_scheduler_options(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("what leads there")
    group.add_argument("--ssh", default="ssh", help="command and options, such as 'ssh -p 2222'")
    group.add_argument("--srun", default="srun", help="command and options, such as 'srun --container-image=...'")
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="such as --sbatch=--time=2-0; may be repeated"
    )
    group.add_argument("--submit", action="store_true", help="hand the batch script or the manifest in, not print it")
    group.add_argument("--image", default="", help="for Kubernetes: image with megarl and ray[default]")
    group.add_argument("--namespace", default="", help="for Kubernetes: where the job is to be")
    group.add_argument("--pod-cpus", type=_count, help="for Kubernetes: CPUs of each pod")
    group.add_argument("--pod-memory", default="", help="for Kubernetes: memory of each pod, such as 900Gi")
    group.add_argument("--pod-shared-memory", default="64Gi", help="for Kubernetes: room in /dev/shm (64Gi)")
    group.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM=PATH", help="for Kubernetes: volume claim; repeatable"
    )
    group.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="for Kubernetes: secret with variables; repeatable",
    )
    group.add_argument(
        "--node-label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for Kubernetes: of the nodes; repeatable",
    )


def pairs(option: str, entries: Sequence[str]) -> dict[str, str]:
    """``A=B`` entries as a mapping.

    Raises:
        ConfigError: one has no ``=``.
    """
    for entry in entries:
        if "=" not in entry.strip("="):
            raise ConfigError(f"{option} {entry}: write it as NAME=VALUE")
    return dict(entry.split("=", 1) for entry in entries)


def _options_with_value() -> set[str]:
    return {name for action in parser()._actions for name in action.option_strings if action.nargs != 0}


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) <= int(high) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of ports such as 10002-19999")
    return int(low), int(high)
