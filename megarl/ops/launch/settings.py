"""Settings of a launch: the job, the cluster, its ports, and the command line of ``ray start``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megarl.base.errors import ConfigError
from megarl.base.timeouts import RAY_SILENCE

Device = Literal["auto", "cpu", "cuda"]
WORKER_PORTS = (10002, 19999)  # Ray's default port range for workers
PORTS_PER_NODE = 8
FIRST_PORT = 6400


class PoolNodes(NamedTuple):
    """Nodes of a resource pool."""

    section: str  # config section with its keys nnodes and n_gpus_per_node
    nodes: int
    devices: int  # of a node


@dataclass(frozen=True)
class JobToRun:
    """Job to run on the cluster, with its requirements."""

    words: tuple[str, ...]  # command line after megarl, such as train --config-name grpo, or a custom command
    is_megarl: bool  # whether words is a megarl job
    name: str  # name for schedulers
    nodes: int
    device: Device
    devices: int  # GPUs, or CPU slots, per machine
    own_pools: tuple[PoolNodes, ...] = ()  # of roles with devices of their own; with_machines adds them to nodes
    size_keys: str = ""  # keys or options that set the number of machines, with their values, for messages
    checkpoint_dir: str = ""  # checkpoint folder; empty = no checkpoints
    notes: tuple[str, ...] = ()  # messages for the user before the start
    is_dry: bool = False  # whether it is a dry run, which needs no cluster

    def command(self, python: str) -> list[str]:
        """Return the driver's command line."""
        return [python, "-m", "megarl.cli", *self.words] if self.is_megarl else list(self.words)


@dataclass(frozen=True)
class Ports:
    """All ports of a node. Every port is set explicitly, for firewalls.

    Raises:
        ConfigError: a port is invalid, or the ranges overlap.
    """

    first: int = FIRST_PORT  # first of eight consecutive ports
    workers: tuple[int, int] = WORKER_PORTS  # lowest and highest port of Ray's workers

    def __post_init__(self) -> None:
        last, (low, high) = self.first + PORTS_PER_NODE - 1, self.workers
        if not (self.first >= 1024 and last < 65536 and 1024 <= low <= high < 65536):
            raise ConfigError(
                f"--port={self.first} and --worker-ports={low}-{high}: ports are from 1024 to 65535",
                code="launch.port-range",
            )
        if self.first <= high and low <= last:
            raise ConfigError(
                f"--port={self.first}: the ports from {self.first} to {last} overlap with --worker-ports={low}-{high}",
                code="launch.port-overlap",
            )

    @property
    def gcs(self) -> int:
        """Port of the cluster's address (GCS), on the head only."""
        return self.first

    @property
    def dashboard(self) -> int:
        """Port of the dashboard, on the head's loopback interface only."""
        return self.first + 1

    def of_node(self) -> dict[str, int]:
        """Return the options of ``ray start`` for the ports of each node."""
        names = (
            "node-manager",
            "object-manager",
            "runtime-env-agent",
            "dashboard-agent-grpc",
            "dashboard-agent-listen",
            "metrics-export",
        )
        return {f"{name}-port": number for number, name in enumerate(names, self.first + 2)}


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a cluster."""

    hosts: tuple[str, ...]  # the nodes; the first is the head
    python: str
    env: dict[str, str] = field(default_factory=dict)  # environment variables for all commands on the nodes
    ports: Ports = field(default_factory=Ports)  # of the head; loopback nodes use the following ports
    interface: str = ""  # network interface of the nodes' addresses; empty = the interface of the host name
    head_address: str = ""  # address of the head; empty = detected
    object_store_bytes: int | None = None  # shared memory for Ray's objects on each node; None = Ray's default
    start_timeout_s: float = 300.0  # time limit for all nodes to join
    grace_s: float = 600.0  # time for the driver to end by itself after a signal
    doctor: bool = True  # whether to run megarl doctor on every node before the job
    log_folder: str = ""  # folder on each node for Ray's logs of a failed run; empty = discard
    address: str = ""  # running Ray cluster to join; empty = start one
    in_ray_job: bool = False  # whether Ray itself signals the driver, as all processes of a job


def host_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def node_ports(settings: ClusterSettings) -> dict[str, Ports]:
    """Return the ports of each host; nodes on one machine share no port."""
    shift, ports = 0, {}
    for host in settings.hosts:
        ports[host] = Ports(settings.ports.first + shift, settings.ports.workers)
        address = host_address(host)
        shift += PORTS_PER_NODE if address is not None and address.is_loopback else 0
    return ports


def ray_start(
    settings: ClusterSettings, job: JobToRun, host: str, address: str, head: str, ports: Ports, folder: str
) -> list[str]:
    """Return the ``ray start --block`` command of a node; it runs as long as the node's Ray.

    Args:
        host: name of the node in the cluster.
        address: address at which other nodes reach it; empty = Ray detects it.
        head: ``address:port`` of the cluster; empty on the head.
    """
    options = {
        "node-name": host,
        "node-ip-address": address,
        "temp-dir": folder,
        **ports.of_node(),
        "min-worker-port": ports.workers[0],
        "max-worker-port": ports.workers[1],
    }
    if head:
        options["address"] = head
    else:
        options |= {"port": ports.gcs, "dashboard-host": "127.0.0.1", "dashboard-port": ports.dashboard}
    if job.device == "cpu":
        options["num-cpus"] = job.devices  # Ray counts the GPUs that are present
    if settings.object_store_bytes is not None:
        options["object-store-memory"] = settings.object_store_bytes
    flags = [f"--{name}={value}" for name, value in options.items() if value != ""]
    # A cluster of fixed size needs no autoscaler, and drivers read no workers' output from a log monitor: each
    # would cost the node a process of one to two seconds of CPU time.
    flags += ["--disable-usage-stats", "--no-monitor", "--include-log-monitor=false"]
    start = [settings.python, "-m", "megarl.cluster.local_ray", "start", "--block"]
    return [*start, *([] if head else ["--head"]), *flags]


def ray_environment(token_file: str, address: str = "", loopback: bool = False) -> dict[str, str]:
    """Return the environment of Ray and its clients; a ``loopback`` cluster is on one machine."""
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file, "PYTHONUNBUFFERED": "1"}
    # The GCS keeps 4 KB of each of the last calls for the dashboard; Ray's default of 100,000 is 400 MB.
    variables["RAY_task_events_max_num_task_in_gcs"] = "10000"
    variables |= {f"RAY_{name}": str(value) for name, value in RAY_SILENCE.items()}
    if address:
        variables["RAY_ADDRESS"] = address
    if loopback:
        # Otherwise Ray replaces 127.0.0.1 by another address of this machine; see megarl/cluster/session.py.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables
