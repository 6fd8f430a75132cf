"""How an agent is started on a node: as a child, by ssh, or by srun."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megarl.errors import ConfigError, ResourceError

AGENT = "megarl.launch.agent"
FORWARDED = (
    *("CUDA_DEVICE_", "GLOO_", "HF_", "MEGARL_", "MKL_", "MLFLOW_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "RAY_"),
    *("SGLANG_", "SWANLAB_", "TENSORBOARD_", "TORCH", "TRANSFORMERS_", "UCX_", "WANDB_", "MODEL", "DATA", "RETRIEVER"),
)
"""Beginnings of the names of variables that ssh's nodes get from here; srun and children inherit all."""
Reach = Callable[[str], list[str]]


def locally(python: str, folder: str) -> Reach:
    """A child of the launcher."""
    return lambda host: ["sh", "-c", _in_folder(folder, [python, "-m", AGENT])]


def by_ssh(python: str, folder: str, ssh: Sequence[str], wrap: Sequence[str]) -> Reach:
    """By a non-interactive ssh, which must need no password.

    Args:
        python: interpreter on the nodes.
        folder: working directory on the nodes.
        ssh: the command and its options, such as ``ssh -p 2222``.
        wrap: put before the interpreter, to enter a container; must pass on stdin and stdout.
    """
    # Both ends notice within two minutes that the other one is gone without a word.
    alive = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8"]
    command = _in_folder(folder, [*wrap, python, "-m", AGENT])
    return lambda host: [*ssh, "-T", "-o", "BatchMode=yes", *alive, host, command]


def by_srun(
    python: str, folder: str, srun: Sequence[str], wrap: Sequence[str], environment: Mapping[str, str]
) -> Reach:
    """By one job step per node, beside others, with all of the node's CPUs and the GPUs that the job has there.

    Args:
        python: interpreter on the nodes.
        folder: working directory on the nodes.
        srun: the command and its options.
        wrap: put before the interpreter, to enter a container.
        environment: of the allocation.
    """
    # A step inherits no --cpus-per-task from the job.
    cpus = environment.get("SLURM_CPUS_ON_NODE", "").strip()
    options = ["--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", "--cpu-bind=none", "--mpi=none"]
    options += [f"--cpus-per-task={cpus}"] if cpus.isdigit() else []
    agent = [*wrap, python, "-m", AGENT]
    return lambda host: [*srun, *options, f"--nodelist={host}", f"--chdir={folder}", *agent]


def parse_hosts(text: str) -> list[str]:
    """Hosts of a list (commas or spaces), or of a file with one per line, of which the first word counts.

    Raises:
        ConfigError: there is none, or one twice.
    """
    path = Path(text).expanduser()
    if ("/" in text or path.suffix) and path.is_file():
        lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
        hosts = [words[0] for words in lines if words]
    elif "/" in text or path.suffix == ".txt":
        raise ConfigError(f"--hosts={text}: there is no such file; name one with a host per line, or host1,host2")
    else:
        hosts = text.replace(",", " ").split()
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not hosts or twice:
        what = f"names {', '.join(twice)} more than once" if twice else "names no host"
        raise ConfigError(f"--hosts={text} {what}; give each host once, as host1,host2 or as a file with one per line")
    wrong = [host for host in hosts if host.startswith("-")]
    if wrong:
        raise ConfigError(f"--hosts: {wrong[0]} is no host")
    return hosts


def local_hosts(nodes: int) -> list[str]:
    """This machine, or, for several nodes on it, loopback addresses of its own for each (Linux has them)."""
    if nodes == 1:
        return ["127.0.0.1"]
    return [f"127.0.0.{2 + node}" for node in range(nodes)]


def slurm_hosts(environment: Mapping[str, str]) -> list[str]:
    """The hosts of the allocation that this process is in.

    Raises:
        ConfigError: it is in none.
        ResourceError: ``scontrol`` cannot say.
    """
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError(
            "--on slurm is for the inside of an allocation (salloc, or a batch script): SLURM_JOB_NODELIST is not set. "
            "--on sbatch prints a batch script, and --submit hands it in"
        )
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except OSError as error:
        raise ResourceError(f"scontrol cannot be started: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(f"scontrol show hostnames {nodes} failed: {error.stderr.strip()}") from error
    return listed.stdout.split()


def forwarded(environment: Mapping[str, str], chosen: Sequence[str], all_of_them: bool) -> dict[str, str]:
    """Variables to give to the nodes.

    Args:
        environment: of the launcher.
        chosen: ``NAME`` or ``NAME=VALUE``, as asked for.
        all_of_them: whether the nodes inherit the environment anyway.

    Raises:
        ConfigError: a name without a value that is not set here.
    """
    found = {} if all_of_them else {name: environment[name] for name in environment if name.startswith(FORWARDED)}
    for entry in chosen:
        name, given, value = entry.partition("=")
        if not given and name not in environment:
            raise ConfigError(f"--env {name}: it is not set here; write --env {name}=VALUE")
        found[name] = value if given else environment[name]
    return found


def _in_folder(folder: str, command: Sequence[str]) -> str:
    return f"cd {shlex.quote(folder)} && exec {shlex.join(command)}"


def current_folder() -> str:
    """Where the launcher was started; on a shared file system it is there on the nodes, too."""
    return os.getcwd()
