"""Agents on remote nodes: the commands that start them (child process, ssh, srun), the hosts, and their connections.

Also the batch scripts that start the launcher inside an allocation of SLURM.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megarl.base.errors import ConfigError, ResourceError
from megarl.ops.launch.protocol import DISCONNECTED, AgentEvent, AgentRequest, decode_event, encode_request
from megarl.ops.launch.settings import JobToRun

AGENT = "megarl.ops.launch.agent"
FORWARDED = (
    *("CUDA_DEVICE_", "GLOO_", "HF_", "MEGARL_", "MKL_", "MLFLOW_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "RAY_"),
    *("SGLANG_", "SWANLAB_", "TENSORBOARD_", "TORCH_", "TORCHINDUCTOR_", "TRANSFORMERS_", "UCX_", "WANDB_"),
)
"""Prefixes of the variables that nodes get over ssh; srun and child processes inherit the whole environment."""
_SLURM_WARNING_S = 120  # time between SLURM's SIGTERM and the time limit
FORWARDED_NAMES = ("DATA", "MODEL", "RETRIEVER")
"""Variables of megarl's run scripts, which nodes get too; ``DATABASE_URL`` is none of them."""
AgentCommand = Callable[[str], list[str]]  # returns the command that starts an agent on a host


def local_agent(python: str, folder: str, *options: str) -> AgentCommand:
    """Start agents as child processes of the launcher."""
    return lambda host: ["sh", "-c", _in_folder(folder, [python, "-m", AGENT, *options])]


def ssh_agent(python: str, folder: str, ssh: Sequence[str], wrap: Sequence[str]) -> AgentCommand:
    """Start agents by ssh without a password; ``wrap`` enters a container and must forward stdin and stdout."""
    # A silent node is lost after 30 s, before Ray's health check ends the driver and hides which node was the cause.
    alive = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6", "-o", "ConnectTimeout=30"]
    command = _in_folder(folder, [*wrap, python, "-m", AGENT])
    return lambda host: [*ssh, "-T", "-o", "BatchMode=yes", *alive, host, command]


def srun_agent(
    python: str, folder: str, srun: Sequence[str], wrap: Sequence[str], environment: Mapping[str, str]
) -> AgentCommand:
    """Start agents as job steps, one per node, with all CPUs of the node and the allocation's GPUs."""
    # A job step does not inherit --cpus-per-task.
    cpus = environment.get("SLURM_CPUS_ON_NODE", "").strip()
    options = ["--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", "--cpu-bind=none", "--mpi=none"]
    options += [f"--cpus-per-task={cpus}"] if cpus.isdigit() else []
    agent = [*wrap, python, "-m", AGENT]
    return lambda host: [*srun, *options, f"--nodelist={host}", f"--chdir={folder}", *agent]


def parse_hosts(text: str) -> list[str]:
    """Parse hosts: a list (commas or spaces), or a file with one host per line (its first word).

    Raises:
        ConfigError: no host, a duplicate, or an invalid name.
    """
    path = Path(text).expanduser()
    if ("/" in text or path.suffix) and path.is_file():
        lines = [line.split("#")[0].split() for line in path.read_text("utf-8", "replace").splitlines()]
        hosts = [words[0] for words in lines if words]
    elif "/" in text or path.suffix == ".txt":
        raise ConfigError(
            f"--hosts={text}: there is no such file; give a file with a host per line, or host1,host2",
            code="launch.no-hosts-file",
        )
    else:
        hosts = text.replace(",", " ").split()
    if not hosts:
        raise ConfigError(
            f"--hosts={text} names no host; write host1,host2 or a file with a host per line", code="launch.no-host"
        )
    if duplicates := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise ConfigError(
            f"--hosts={text} names {', '.join(duplicates)} more than once; name each host once",
            code="launch.duplicate-host",
        )
    invalid = [host for host in hosts if host.startswith("-")]
    if invalid:
        raise ConfigError(f"--hosts: {invalid[0]} is not a host", code="launch.host-name")
    return hosts


def local_hosts(nodes: int) -> list[str]:
    """Return the address of this machine, or a separate loopback address for each of several nodes (Linux)."""
    if nodes == 1:
        return ["127.0.0.1"]
    return [f"127.0.0.{2 + node}" for node in range(nodes)]


def slurm_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the hosts of the SLURM allocation of this process.

    Raises:
        ConfigError: the process is not in an allocation.
        ResourceError: ``scontrol`` fails.
    """
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError(
            "--on slurm works inside an allocation (salloc, or a batch script): SLURM_JOB_NODELIST is not set. "
            "--on sbatch prints a batch script, and --submit submits it",
            code="launch.no-allocation",
        )
    try:
        process = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except OSError as error:
        raise ResourceError(f"scontrol cannot be started: {error}", code="launch.no-scontrol") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(
            f"scontrol show hostnames {nodes} failed: {error.stderr.strip()}", code="launch.scontrol-failed"
        ) from error
    return process.stdout.split()


def batch_script(job: JobToRun, launcher: Sequence[str], folder: str, options: Sequence[str]) -> str:
    """Write a batch script that runs the launcher in its allocation; options of sbatch override the defaults."""
    directives = {
        "--job-name": job.name,
        "--nodes": str(job.nodes),
        "--ntasks-per-node": "1",
        "--output": f"{job.name}-%j.log",
        "--signal": f"B:TERM@{_SLURM_WARNING_S}",
    }
    if job.device != "cpu":
        directives["--gpus-per-node"] = str(job.devices)
    overridden = {option.split("=")[0] for option in options}
    lines = [f"#SBATCH {name}={value}" for name, value in directives.items() if name not in overridden]
    # Whole nodes; the allocation survives a failed node, since the launcher decides about a restart.
    lines += ["#SBATCH --exclusive", "#SBATCH --no-kill", *(f"#SBATCH {option}" for option in options)]
    # With exec no shell delays signals until its foreground command ends.
    return "\n".join(["#!/bin/bash", *lines, f"cd {shlex.quote(folder)}", f"exec {shlex.join(launcher)}", ""])


def submit_batch(script: str) -> str:
    """Submit a batch script; returns sbatch's output, the job ID.

    Raises:
        ResourceError: sbatch refuses the script.
    """
    try:
        process = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=True)
    except OSError as error:
        raise ResourceError(f"sbatch cannot be started: {error}", code="launch.no-sbatch") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(
            f"sbatch refused the script: {error.stderr.strip()}", code="launch.sbatch-refused"
        ) from error
    return process.stdout.strip()


def forwarded_environment(environment: Mapping[str, str], entries: Sequence[str], inherits: bool) -> dict[str, str]:
    """Select the variables to send to the nodes.

    Args:
        entries: values of ``--env``: ``NAME`` or ``NAME=VALUE``.
        inherits: whether the nodes inherit the environment of the launcher.

    Raises:
        ConfigError: a name without a value is not set in the environment.
    """
    names = [name for name in environment if name in FORWARDED_NAMES or name.startswith(FORWARDED)]
    variables = {} if inherits else {name: environment[name] for name in names}
    for entry in entries:
        name, sign, value = entry.partition("=")
        if not sign and name not in environment:
            raise ConfigError(
                f"--env {name}: it is not set here; write --env {name}=VALUE", code="launch.variable-not-set"
            )
        variables[name] = value if sign else environment[name]
    return variables


def _in_folder(folder: str, command: Sequence[str]) -> str:
    return f"cd {shlex.quote(folder)} && exec {shlex.join(command)}"


def current_folder() -> str:
    """Return the working directory of the launcher; on a shared file system it exists on the nodes too."""
    return str(Path.cwd())


_TAIL_LINES = 20
_KILL_TIMEOUT_S = 10.0


class RemoteAgent:
    """Connection to an agent: its process here (ssh, srun, or the agent itself), requests in and events out.

    Args:
        argv: command that starts the agent there and connects its stdin and stdout.
        events: queue for the events of the node, with :data:`megarl.ops.launch.protocol.DISCONNECTED` at the end.

    Raises:
        ResourceError: the command cannot be started here.
    """

    def __init__(self, host: str, argv: Sequence[str], events: queue.SimpleQueue[AgentEvent]) -> None:
        self.host = host
        self._events = events
        self._other_output: deque[str] = deque(maxlen=_TAIL_LINES)
        try:
            # A new session: a Ctrl-C in the terminal reaches the launcher only, which forwards it.
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(
                f"{host}: {argv[0]} cannot be started here: {error}", code="launch.no-remote-shell"
            ) from error
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        self._event_reader = threading.Thread(target=self._read_events, daemon=True)
        self._event_reader.start()

    def send(self, request: AgentRequest) -> None:
        """Send a request; a lost agent is reported by its DISCONNECTED event."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(encode_request(request))
            self._process.stdin.flush()

    def close(self, timeout_s: float) -> bool:
        """Wait for the end of the connection, and kill it after the timeout; returns whether it ended by itself."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        in_time = True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            in_time = False
            self._kill()
        self._event_reader.join(_KILL_TIMEOUT_S)
        return in_time

    def _kill(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_TIMEOUT_S)
                return

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = decode_event(line, self.host)
            if event is None:
                self._other_output.append(line.rstrip())
            else:
                self._events.put(event)
        code = self._process.wait()
        self._stderr_reader.join(1.0)
        reason = "\n".join(filter(None, self._other_output))
        self._events.put(AgentEvent(DISCONNECTED, self.host, "", {"code": code, "reason": reason}))

    def _read_stderr(self) -> None:
        """Keep the last messages of ssh, srun, or the starting Python."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._other_output.append(line.rstrip())
