"""``megarl launch``: run a job on a cluster, with restarts, or print a scheduler's job."""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from megarl.base.commands import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, exit_code
from megarl.base.errors import ConfigError, ResourceError
from megarl.base.formatting import GIB, MIB, count_noun
from megarl.ops.jobs.command import run_job
from megarl.ops.launch import remote
from megarl.ops.launch.agent import IGNORE_SIGNALS, OTHER_CLUSTER_VARIABLES
from megarl.ops.launch.options import (
    LOCAL_RAY,
    check_unused_options,
    command_job,
    launch_parser,
    read_job,
    split_job,
    with_machines,
)
from megarl.ops.launch.protocol import AgentEvent
from megarl.ops.launch.session import INTERRUPT, ClusterSession, LaunchInterrupted, NodeLost, silent_hosts
from megarl.ops.launch.settings import ClusterSettings, JobToRun, Ports

CPU_OBJECT_STORE_BYTES = 200 * MIB  # size of Ray's object store for CPU jobs; Ray's default is a third of the memory
LONGEST_DELAY_S = 300.0
RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the entrypoint of a job of its Jobs API


def main(argv: Sequence[str] | None = None) -> int:
    """Launch a job, or print a scheduler's job; returns the driver's exit code, 1 without one, 2 for wrong input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        launch_parser().parse_args(arguments[:1])
    return exit_code(lambda: _main(arguments))


def _main(arguments: Sequence[str]) -> int:
    launch_arguments, words, is_megarl = split_job(arguments)
    options = launch_parser().parse_args(launch_arguments)
    if is_megarl:
        job = read_job(words, options.max_restarts)
    else:
        job = command_job(words, options.nodes, options.devices_per_node, options.device)
    if job.is_dry:
        return run_job(job.words[0], job.words[1:])
    place = _resolve_place(options)
    check_unused_options(options, place, is_megarl=is_megarl)
    job = with_machines(job, place, options.devices_per_node if is_megarl else None)
    for note in job.notes:
        say(note)
    if place == "sbatch":
        return _sbatch(options, job, launch_arguments, words)
    return _launch(place, options, job)


def say(line: str) -> None:
    """Print a message of the launcher, with a prefix that distinguishes it from the driver's output."""
    print(f"launch: {line}", file=sys.stderr, flush=True)


class Launcher:
    """Runs a job on a cluster, with a new cluster session for each restart.

    Args:
        settings: settings of the cluster; hosts beyond the number that the job needs are spares.
        max_restarts: attempts after the first.
        delay_s: seconds before the first restart; doubled for each restart, up to :data:`LONGEST_DELAY_S`.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        job: JobToRun,
        agent_command: Callable[[str], Sequence[str]],
        max_restarts: int,
        delay_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.settings, self.job, self.agent_command = settings, job, agent_command
        self.max_restarts, self.delay_s, self.say = max_restarts, delay_s, say
        self._hosts = list(settings.hosts)
        self._events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
        self._signal: int | None = None

    def run(self) -> int:
        """Run the job; returns the driver's exit code, 1 without one, 128 + n if signal n came before it."""
        with self._queue_signals():
            for number in range(1, self.max_restarts + 2):
                try:
                    code, reason, final = self._run_session(number)
                    if final or number > self.max_restarts:
                        if reason:
                            self.say(f"{reason}. {self._no_restart_reason(code, final)}")
                        return code
                    self._wait_before_restart(number, reason)
                    self._prefer_live_hosts()
                except LaunchInterrupted as interrupt:
                    return interrupt.code if interrupt.code is not None else 128 + interrupt.number
        raise AssertionError("the last attempt is final")

    def _run_session(self, number: int) -> tuple[int, str, bool]:
        """Run one cluster session; returns exit code, reason of a failure (or empty), and whether it is the last."""
        hosts, folder = tuple(self._hosts[: self.job.nodes]), self.settings.log_folder
        settings = replace(self.settings, hosts=hosts, log_folder=folder and f"{folder}/attempt_{number}")
        self._events, ready = queue.SimpleQueue(), False
        if self._signal is not None:  # received after the previous session's last check
            raise LaunchInterrupted(self._signal)
        session = ClusterSession(settings, self.job, self.agent_command, self._events, self.say, number > 1)
        try:
            with closing(session):
                session.start()
                if settings.doctor:
                    session.run_doctor()
                ready = True
                code = session.run_driver()
        except NodeLost as error:
            return EXIT_FAILED, str(error), number == 1 and not ready
        except ResourceError as error:
            # The user must correct a cluster that never started. After a first success, a node may come back.
            return EXIT_FAILED, str(error), number == 1
        finally:
            self._hosts.sort(key=session.lost.__contains__)  # spares before lost hosts
        is_config_error = code == EXIT_BAD_INPUT and self.job.is_megarl
        reason = f"the driver ended with code {code}" if code else ""
        return code, reason, is_config_error or code in (0, EXIT_INTERRUPTED)

    def _no_restart_reason(self, code: int, final: bool) -> str:
        if final and code == EXIT_BAD_INPUT:
            return "A wrong configuration fails again: no restart"
        if final and code == EXIT_INTERRUPTED:
            return "It was interrupted: no restart"
        if final:
            return "Nothing has run yet: no restart"
        return f"No restart is left of {self.max_restarts}" if self.max_restarts else "--max-restarts=N would try again"

    def _wait_before_restart(self, number: int, reason: str) -> None:
        """Wait before another attempt.

        Raises:
            LaunchInterrupted: the launcher received a signal.
        """
        delay = min(LONGEST_DELAY_S, self.delay_s * 2 ** (number - 1))
        self.say(f"{reason}. Restart {number} of {self.max_restarts} in {delay:g} s, from the newest checkpoint")
        deadline = time.monotonic() + delay
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=remaining)
            except queue.Empty:
                return
            if event.kind == INTERRUPT:
                raise LaunchInterrupted(event.facts["number"])

    def _prefer_live_hosts(self) -> None:
        """Ask all hosts if there are spares, and move silent hosts behind the others.

        Raises:
            LaunchInterrupted: the launcher received a signal.
        """
        if len(self._hosts) > self.job.nodes:
            self._events = queue.SimpleQueue()
            if silent := silent_hosts(self._hosts, self.agent_command, self._events):
                self.say(f"no answer from {', '.join(silent)}")
                self._hosts.sort(key=silent.__contains__)

    @contextmanager
    def _queue_signals(self) -> Iterator[None]:
        """Turn signals into events, handled only at the points where the launcher waits."""

        def add_event(number: int, frame: FrameType | None) -> None:
            self._signal = number
            self._events.put(AgentEvent(INTERRUPT, facts={"number": number}))

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, add_event) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _resolve_place(options: argparse.Namespace) -> str:
    """Resolve ``--on auto``.

    Raises:
        ConfigError: hosts without ssh, or ssh without hosts.
    """
    place = str(options.on)
    if place == "auto":
        place = "ssh" if options.hosts else "slurm" if "SLURM_JOB_NODELIST" in os.environ else "local"
    if (place == "ssh") != bool(options.hosts):
        hint = "needs --hosts=host1,host2,..." if place == "ssh" else f"detects its hosts, not --hosts={options.hosts}"
        raise ConfigError(f"--on {place} {hint}", code="launch.hosts-option")
    if options.submit and place != "sbatch":
        raise ConfigError("--submit is for --on sbatch; the others start the job at once", code="launch.unused-option")
    return place


def _launch(place: str, options: argparse.Namespace, job: JobToRun) -> int:
    if place == LOCAL_RAY:
        return _join(options, job)
    agent_command, hosts = _agents_and_hosts(place, options, job)
    if len(hosts) < job.nodes:
        raise ConfigError(
            f"{job.size_keys}: {count_noun(job.nodes, 'node')}, but hosts are only {len(hosts)}: {', '.join(hosts)}. "
            "Add hosts, lower the number of nodes, or let nodes share a machine by --devices-per-node",
            code="launch.too-few-hosts",
        )
    if len(hosts) > job.nodes:
        say(f"{job.nodes} of {len(hosts)} hosts are used; {', '.join(hosts[job.nodes :])} are spares")
    say(f"{shlex.join(job.words)} on {', '.join(hosts[: job.nodes])} ({place})")
    settings = _cluster_settings(options, job, tuple(hosts), inherits=place != "ssh")
    return Launcher(settings, job, agent_command, options.max_restarts, options.restart_delay, say).run()


def _join(options: argparse.Namespace, job: JobToRun) -> int:
    """Run the job on the running cluster at ``RAY_ADDRESS``, with this machine as the driver's.

    Raises:
        ConfigError: ``RAY_ADDRESS`` is not set, or is the address of Ray's Jobs API.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if not address or "://" in address:
        raise ConfigError(
            f"--on {LOCAL_RAY} joins the cluster at RAY_ADDRESS={address or '(not set)'}: set it to auto on a node of "
            "the cluster, or to host:port of its head. From elsewhere, submit the launcher by `ray job submit`",
            code="launch.ray-address",
        )
    say(f"{shlex.join(job.words)} on the Ray cluster at {address}")
    settings = _cluster_settings(options, job, (socket.gethostname(),), inherits=True)
    variables = {name: os.environ[name] for name in OTHER_CLUSTER_VARIABLES if name in os.environ}
    settings = replace(
        settings, env=settings.env | variables, address=address, in_ray_job=RAY_JOB_VARIABLE in os.environ
    )
    agent_command = remote.local_agent(options.python, options.workdir, IGNORE_SIGNALS)
    return Launcher(settings, job, agent_command, options.max_restarts, options.restart_delay, say).run()


def _agents_and_hosts(place: str, options: argparse.Namespace, job: JobToRun) -> tuple[remote.AgentCommand, list[str]]:
    """Return the command that starts agents, and all hosts."""
    python, folder, wrap = options.python, options.workdir, shlex.split(options.wrap)
    if place == "ssh":
        return remote.ssh_agent(python, folder, shlex.split(options.ssh), wrap), remote.parse_hosts(options.hosts)
    if place == "slurm":
        agent_command = remote.srun_agent(python, folder, shlex.split(options.srun), wrap, os.environ)
        return agent_command, remote.slurm_hosts(os.environ)
    if job.nodes > 1 and job.device == "cuda":
        raise ConfigError(
            f"{job.size_keys} on one machine: nodes would share its GPUs. List the other nodes by --hosts, or set one "
            "node",
            code="launch.nodes-share-gpus",
        )
    return remote.local_agent(python, folder), remote.local_hosts(job.nodes)


def _cluster_settings(
    options: argparse.Namespace, job: JobToRun, hosts: tuple[str, ...], inherits: bool
) -> ClusterSettings:
    store = None if options.object_store_gb is None else int(options.object_store_gb * GIB)
    if store is None and job.device == "cpu":
        store = CPU_OBJECT_STORE_BYTES
    logs = Path("outputs") / job.name / "ray_logs" / time.strftime("%Y-%m-%d_%H-%M-%S")
    return ClusterSettings(
        hosts=hosts,
        python=options.python,
        env=remote.forwarded_environment(os.environ, options.env, inherits),
        ports=Ports(options.port, options.worker_ports),
        interface=options.interface,
        head_address=options.head_address,
        object_store_bytes=store,
        start_timeout_s=options.start_timeout,
        grace_s=options.grace,
        doctor=not options.no_doctor,
        log_folder=str(logs),
    )


def _sbatch(options: argparse.Namespace, job: JobToRun, launch_arguments: Sequence[str], words: Sequence[str]) -> int:
    launcher = [options.python, "-m", "megarl.ops.launch", "--on", "slurm", *_without_sbatch(launch_arguments)]
    launcher += [*([] if job.is_megarl else ["--"]), *words]
    script = remote.batch_script(job, launcher, options.workdir, options.sbatch)
    print(remote.submit_batch(script) if options.submit else script, end="\n" if options.submit else "")
    return 0


def _without_sbatch(arguments: Sequence[str]) -> list[str]:
    """Drop the options of the batch script itself from the launcher's arguments."""
    kept, skip = [], False
    for word in arguments:
        if skip or word == "--submit" or word.startswith(("--on=", "--sbatch=")):
            skip = False
        elif word in ("--on", "--sbatch"):
            skip = True
        else:
            kept.append(word)
    return kept


if __name__ == "__main__":
    sys.exit(main())
