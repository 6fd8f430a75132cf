"""Command line of the launcher: its options, and the job with its requirements."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.base.errors import ConfigError
from megarl.config.problems import nearest_keys
from megarl.config.schema.jobs import own_pools
from megarl.config.schema.run import TrainingRunConfig
from megarl.ops.jobs.table import JOBS, compose_job
from megarl.ops.launch.remote import current_folder
from megarl.ops.launch.settings import FIRST_PORT, WORKER_PORTS, Device, JobToRun, PoolNodes

RESUMING = ("auto", "must")
JOB_NAMES = f"{', '.join([*JOBS][:-1])} or {[*JOBS][-1]}"
LOCAL_RAY = "local-ray"
PLACES = ("auto", "local", "ssh", "slurm", "sbatch", LOCAL_RAY)
_EPILOG = f"""\
A job is {JOB_NAMES} with its arguments, as after `megarl`; or, after `--`, any command that
joins the Ray cluster at RAY_ADDRESS. The configuration sets the number of nodes and devices
(trainer.nnodes, trainer.n_gpus_per_node; roles with devices of their own add
theirs, such as critic.nnodes). For everything else see docs/how_to/launch.md."""
_WORKER_PORTS_HELP = f"ports of Ray's workers ({'-'.join(map(str, WORKER_PORTS))})"
_COMMAND_OPTIONS = ("nodes", "device")
_STARTS_RAY = tuple(place for place in PLACES if place != LOCAL_RAY)
_OPTION_PLACES: dict[str, Sequence[str]] = {
    "sbatch": ("sbatch",),
    "srun": ("slurm", "sbatch"),
    "ssh": ("ssh",),
    "wrap": ("ssh", "slurm", "sbatch"),
    **dict.fromkeys(("interface", "head_address", "port", "worker_ports", "object_store_gb"), _STARTS_RAY),
}
"""Options that apply to some values of ``--on`` only."""


def split_job(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Split the command line into launcher options and job.

    Returns:
        Arguments of the launcher, the job's command line (from its name, or after ``--``), whether it is a megarl job.

    Raises:
        ConfigError: there is no job.
    """
    takes_value = {name for action in launch_parser()._actions for name in action.option_strings if action.nargs != 0}
    skip = False
    for index, word in enumerate(argv):
        if skip:
            skip = False
        elif word == "--":
            if argv[index + 1 :]:
                return list(argv[:index]), list(argv[index + 1 :]), False
            break
        elif word.startswith("-"):
            skip = word in takes_value
        elif word in JOBS:
            return list(argv[:index]), list(argv[index:]), True
        else:
            nearest = " or ".join(nearest_keys(word, JOBS))
            guess = f"; did you mean {nearest}?" if nearest else "."
            raise ConfigError(
                f"megarl launch: {word!r} is not a job{guess} Jobs are {JOB_NAMES}", code="launch.unknown-job"
            )
    raise ConfigError("megarl launch: no job is named, such as train; see megarl launch --help", code="launch.no-job")


def check_unused_options(options: argparse.Namespace, place: str, *, is_megarl: bool) -> None:
    """Refuse options without an effect at a place, a resolved value of ``--on``.

    Raises:
        ConfigError: an option has no effect.
    """
    default = launch_parser().get_default
    changed = [name for name in (*_OPTION_PLACES, *_COMMAND_OPTIONS) if getattr(options, name) != default(name)]
    for name in changed:
        places, option = _OPTION_PLACES.get(name, PLACES), f"--{name.replace('_', '-')}"
        if place not in places:
            raise ConfigError(
                f"{option} is for --on {' and '.join(places)}; this is --on {place}", code="launch.unused-option"
            )
        if is_megarl and name in _COMMAND_OPTIONS:
            raise ConfigError(
                f"{option} is for a command after --; for a job set trainer.nnodes, trainer.n_gpus_per_node or "
                "trainer.device",
                code="launch.command-option",
            )


def launch_parser() -> argparse.ArgumentParser:
    """Build the parser of the launcher's options."""
    parser = argparse.ArgumentParser(
        prog="megarl launch",
        usage="megarl launch [options] JOB [KEY=VALUE ...]\n       megarl launch [options] -- COMMAND ...",
        description="Start a Ray cluster, run a job on it, and shut it down; or run it on a running cluster.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--on",
        choices=PLACES,
        default="auto",
        help="auto: ssh with --hosts, slurm in an allocation, else local; local-ray: join the cluster at RAY_ADDRESS",
    )
    parser.add_argument("--hosts", help="for ssh: host1,host2,... or a file with one per line; the first is the head")
    parser.add_argument("--max-restarts", type=_count, default=0, metavar="N", help="restarts after failures (0)")
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}
    parser.add_argument("--restart-delay", default=10.0, help="seconds before a restart; doubles (10)", **seconds)
    parser.add_argument("--start-timeout", default=300.0, help="seconds for all nodes to join (300)", **seconds)
    parser.add_argument(
        "--grace", default=600.0, help="seconds for the driver to save and end after Ctrl-C or SIGTERM (600)", **seconds
    )
    parser.add_argument("--no-doctor", action="store_true", help="do not check the nodes before the job starts")
    _add_node_options(parser)
    _add_scheduler_options(parser)
    return parser


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the nodes")
    group.add_argument("--nodes", type=_count, help="for a command after --: number of machines")
    group.add_argument(
        "--devices-per-node", type=_count, help="devices of each machine; default for a job: those of a node"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="for a command after --")
    group.add_argument("--python", default=sys.executable, help="interpreter on the nodes; default: this one's path")
    group.add_argument("--workdir", default=current_folder(), help="working directory on the nodes; default: this one")
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="variable for the nodes; repeatable"
    )
    group.add_argument("--wrap", default="", help="prefix of Python on each node, to enter a container")
    group.add_argument("--interface", default="", help="network interface whose address each node uses, such as ib0")
    group.add_argument("--head-address", default="", help="address of the head, if the detected one is wrong")
    group.add_argument("--port", type=_count, default=FIRST_PORT, help=f"first of a node's eight ports ({FIRST_PORT})")
    group.add_argument("--worker-ports", type=_range, default=WORKER_PORTS, metavar="LOW-HIGH", help=_WORKER_PORTS_HELP)
    group.add_argument("--object-store-gb", type=float, help="GiB of shared memory for Ray's objects on each node")


def _add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedulers")
    group.add_argument("--ssh", default="ssh", help="command and options, such as 'ssh -p 2222'")
    group.add_argument("--srun", default="srun", help="command and options, such as 'srun --container-image=...'")
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="such as --sbatch=--time=2-0; repeatable"
    )
    group.add_argument("--submit", action="store_true", help="submit the batch script, not print it")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) <= int(high) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of ports such as 10002-19999")
    return int(low), int(high)


def read_job(words: Sequence[str], max_restarts: int) -> JobToRun:
    """Read the requirements of a megarl job from its configuration.

    ``nodes`` are the trainer's; :func:`with_machines` adds those of roles with devices of their own.

    Args:
        words: the job's name and arguments, as after ``megarl``.

    Raises:
        ConfigError: the configuration is invalid, or cannot be combined with restarts.
        ModelError: the model folder is invalid.
    """
    name, *arguments = words
    config = compose_job(name, arguments)
    trainer = config.trainer
    notes: tuple[str, ...] = ()
    if max_restarts and isinstance(trainer, TrainingRunConfig):
        notes = _check_restarts(trainer)
    folder = trainer.default_local_dir if isinstance(trainer, TrainingRunConfig) and trainer.save_freq > 0 else None
    pools = [PoolNodes(path, keys.nnodes, keys.n_gpus_per_node or 1) for path, keys in own_pools(config).items()]
    device: Device = "cpu" if trainer.device == "cpu" else "cuda" if trainer.device == "cuda" else "auto"
    return JobToRun(
        words=tuple(words),
        is_megarl=True,
        name=trainer.experiment_name,
        nodes=trainer.nnodes,
        device=device,
        devices=trainer.n_gpus_per_node,
        own_pools=tuple(pools),
        size_keys=f"trainer.nnodes={trainer.nnodes}",
        checkpoint_dir=folder or "",
        notes=notes,
        is_dry=isinstance(trainer, TrainingRunConfig) and trainer.dry_run,
    )


def command_job(words: Sequence[str], nodes: int | None, devices: int | None, device: Device) -> JobToRun:
    """Describe a custom command, which joins the cluster at ``RAY_ADDRESS``.

    Raises:
        ConfigError: the number of machines or devices is not set.
    """
    if nodes is None or devices is None:
        raise ConfigError(
            f"-- {' '.join(words)}: set its requirements by --nodes and --devices-per-node", code="launch.command-size"
        )
    return JobToRun(tuple(words), False, "command", nodes, device, devices, size_keys=f"--nodes={nodes}")


def with_machines(job: JobToRun, place: str, devices_per_node: int | None) -> JobToRun:
    """Count the machines that hold the nodes of the trainer, and of roles with devices of their own.

    Without a number of devices per machine each node is a machine, except that with ``--on local`` the machine holds
    all pools if each has one node.

    Args:
        place: resolved value of ``--on``.

    Raises:
        ConfigError: a node has more devices than a machine, or the pools differ in devices per node and the devices
            per machine are not set.
    """
    pools = [PoolNodes("trainer", job.nodes, job.devices), *job.own_pools]
    if devices_per_node is None:
        if not job.own_pools:
            return job
        if place == "local" and all(pool.nodes == 1 for pool in pools):
            devices_per_node = sum(pool.devices for pool in pools)
        elif len({pool.devices for pool in pools}) == 1:
            devices_per_node = job.devices
        else:
            sizes = " and ".join(f"{pool.section}.n_gpus_per_node={pool.devices}" for pool in pools)
            raise ConfigError(
                f"{sizes} differ. Set the devices of each machine by --devices-per-node, so that the launcher knows "
                "which nodes share one",
                code="launch.machine-size",
            )
    for pool in pools:
        if pool.devices > devices_per_node:
            raise ConfigError(
                f"{pool.section}.n_gpus_per_node={pool.devices} exceeds --devices-per-node={devices_per_node}, the "
                "devices of a machine",
                code="launch.node-exceeds-machine",
            )
    keys = " and ".join([job.size_keys, *(f"{pool.section}.nnodes={pool.nodes}" for pool in job.own_pools)])
    nodes = _machines([pool.devices for pool in pools for _ in range(pool.nodes)], devices_per_node)
    return replace(job, nodes=nodes, devices=devices_per_node, size_keys=keys)


def _machines(nodes: Sequence[int], capacity: int) -> int:
    """Count the machines of ``capacity`` devices that hold nodes of these sizes, placed from large to small."""
    free: list[int] = []
    for devices in sorted(nodes, reverse=True):
        fitting = [at for at, left in enumerate(free) if left >= devices]
        if fitting:
            free[min(fitting, key=free.__getitem__)] -= devices  # best fit, as megarl.cluster.resources places pools
        else:
            free.append(capacity - devices)
    return len(free)


def _check_restarts(trainer: TrainingRunConfig) -> tuple[str, ...]:
    """Check that a restart of the same command resumes from the newest checkpoint; returns notes for the user.

    Raises:
        ConfigError: it would start from scratch, or from the checkpoint of another run.
    """
    if trainer.resume_mode not in RESUMING:
        raise ConfigError(
            f"trainer.resume_mode={trainer.resume_mode}: a restart (--max-restarts) would begin from scratch, or at "
            "the same checkpoint again. Set trainer.resume_mode=auto, and give the run its own "
            "trainer.default_local_dir",
            code="launch.restart-from-scratch",
        )
    if trainer.save_freq < 1:
        return ("trainer.save_freq=-1: nothing is saved, so a restart begins from scratch",)
    return ()
