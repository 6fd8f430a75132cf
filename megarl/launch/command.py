"""The command line ``megarl launch``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import yaml

from megarl.cli import EXIT_BAD_CONFIG, EXIT_RUN_FAILED
from megarl.cli import main as run_here
from megarl.errors import ConfigError, ModelError, ResourceError
from megarl.launch import kubernetes, sbatch
from megarl.launch.job import other_command, read_job
from megarl.launch.options import check_use, pairs, parser, split_job
from megarl.launch.reach import Reach, by_srun, by_ssh, forwarded, local_hosts, locally, parse_hosts, slurm_hosts
from megarl.launch.restarts import Launcher
from megarl.launch.settings import ClusterSettings, JobToRun, Ports

SMALL_OBJECT_STORE_BYTES = 200 * 2**20
"""Where the job computes on CPUs; Ray would take a third of the memory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Launches a job, or prints what a scheduler needs to launch it.

    Args:
        argv: the arguments; None = those of the process.

    Returns:
        The driver's exit code; 1 where none could be started, 2 for a wrong command line or configuration.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        parser().parse_args(arguments[:1])
    try:
        own, words, is_megarl = split_job(arguments)
        options = parser().parse_args(own)
        if is_megarl:
            job = read_job(words, options.max_restarts)
        else:
            job = other_command(words, options.nodes, options.devices_per_node, options.device)
        if job.is_dry:
            return run_here(job.words)
        place = _place(options)
        check_use(options, place, is_megarl=is_megarl)
        for note in job.notes:
            say(note)
        if place == "sbatch":
            return _batch(options, job, own, words)
        if place == "kubernetes":
            return _kubernetes(options, job)
        return _launch(place, options, job)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    except ResourceError as error:
        print(error, file=sys.stderr)
        return EXIT_RUN_FAILED


def say(line: str) -> None:
    """A line of the launcher's own, told apart from the driver's."""
    print(f"launch: {line}", file=sys.stderr, flush=True)


def _place(options: argparse.Namespace) -> str:
    """Where to launch.

    Raises:
        ConfigError: hosts without ssh, or ssh without hosts.
    """
    place = str(options.on)
    if place == "auto":
        place = "ssh" if options.hosts else "slurm" if "SLURM_JOB_NODELIST" in os.environ else "local"
    if (place == "ssh") != bool(options.hosts):
        what = "needs --hosts=host1,host2,..." if place == "ssh" else f"has its own hosts, not --hosts={options.hosts}"
        raise ConfigError(f"--on {place} {what}")
    if options.submit and place not in ("sbatch", "kubernetes"):
        raise ConfigError("--submit is for --on sbatch and --on kubernetes; the others start the job at once")
    return place


def _launch(place: str, options: argparse.Namespace, job: JobToRun) -> int:
    reach, hosts = _ways(place, options, job)
    if len(hosts) < job.nodes:
        raise ConfigError(
            f"trainer.nnodes={job.nodes}, but hosts are only {len(hosts)}: {', '.join(hosts)}. Give more, or set "
            f"trainer.nnodes={len(hosts)}"
        )
    if len(hosts) > job.nodes:
        say(f"{job.nodes} of {len(hosts)} hosts are used; {', '.join(hosts[job.nodes :])} are spares")
    say(f"{shlex.join(job.words)} on {', '.join(hosts[: job.nodes])} ({place})")
    settings = _settings(options, job, tuple(hosts), inherits=place != "ssh")
    return Launcher(settings, job, reach, options.max_restarts, options.restart_delay, say).run()


def _ways(place: str, options: argparse.Namespace, job: JobToRun) -> tuple[Reach, list[str]]:
    """How nodes are reached, and which there are."""
    python, folder, wrap = options.python, options.workdir, shlex.split(options.wrap)
    if place == "ssh":
        return by_ssh(python, folder, shlex.split(options.ssh), wrap), parse_hosts(options.hosts)
    if place == "slurm":
        return by_srun(python, folder, shlex.split(options.srun), wrap, os.environ), slurm_hosts(os.environ)
    if wrap:
        raise ConfigError("--wrap is for ssh and slurm; start the launcher itself in the container")
    if job.nodes > 1 and job.device == "cuda":
        raise ConfigError(
            f"trainer.nnodes={job.nodes} on one machine: nodes would share its GPUs. Name the others by --hosts, or "
            "set trainer.nnodes=1"
        )
    return locally(python, folder), local_hosts(job.nodes)


def _settings(options: argparse.Namespace, job: JobToRun, hosts: tuple[str, ...], inherits: bool) -> ClusterSettings:
    store = None if options.object_store_gb is None else int(options.object_store_gb * 2**30)
    if store is None and job.device == "cpu":
        store = SMALL_OBJECT_STORE_BYTES
    logs = Path("outputs") / job.name / "ray_logs" / time.strftime("%Y-%m-%d_%H-%M-%S")
    return ClusterSettings(
        hosts=hosts,
        python=options.python,
        env=forwarded(os.environ, options.env, inherits),
        ports=Ports(options.port, options.worker_ports),
        interface=options.interface,
        head_address=options.head_address,
        object_store_bytes=store,
        start_timeout_s=options.start_timeout,
        grace_s=options.grace,
        doctor=not options.no_doctor,
        log_folder=str(logs),
    )


def _batch(options: argparse.Namespace, job: JobToRun, own: Sequence[str], words: Sequence[str]) -> int:
    launcher = [options.python, "-m", "megarl.launch", "--on", "slurm", *_for_inside(own)]
    launcher += [*([] if job.is_megarl else ["--"]), *words]
    script = sbatch.batch_script(job, launcher, options.workdir, options.sbatch)
    print(sbatch.submit(script) if options.submit else script, end="\n" if options.submit else "")
    return 0


def _for_inside(own: Sequence[str]) -> list[str]:
    """The launcher's own arguments but for those that are about the batch script."""
    kept, skip = [], False
    for word in own:
        if skip or word == "--submit" or word.startswith(("--on=", "--sbatch=")):
            skip = False
        elif word in ("--on", "--sbatch"):
            skip = True
        else:
            kept.append(word)
    return kept


def _kubernetes(options: argparse.Namespace, job: JobToRun) -> int:
    if not options.image:
        raise ConfigError("--on kubernetes needs --image: a container image with megarl and ray[default]")
    pods = kubernetes.PodSettings(
        image=options.image,
        namespace=options.namespace,
        cpus=options.pod_cpus,
        memory=options.pod_memory,
        shared_memory=options.pod_shared_memory,
        volumes=pairs("--volume", options.volume),
        secrets=tuple(options.secret),
        env=forwarded(os.environ, options.env, True),
        node_selector=pairs("--node-label", options.node_label),
        folder=options.workdir if options.workdir != parser().get_default("workdir") else "",
    )
    manifest = kubernetes.ray_job(job, pods, Ports(options.port), options.max_restarts, version("ray"))
    text = yaml.safe_dump(manifest, sort_keys=False, width=1000)
    print(kubernetes.apply(text) if options.submit else text, end="\n" if options.submit else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
