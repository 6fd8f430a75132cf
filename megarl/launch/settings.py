"""What a launch is: the job, its nodes, and how they are reached."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal

from megarl.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
WORKER_PORTS = (10002, 19999)
"""Ray's own range for its workers."""
PORTS_PER_NODE = 9
FIRST_PORT = 6400


@dataclass(frozen=True)
class JobToRun:
    """What runs on the cluster once it is there.

    Attributes:
        words: the job's command line after ``megarl``, such as ``train --config-name grpo``, or any command.
        is_megarl: whether ``words`` are megarl's.
        name: for schedulers.
        nodes: machines that it needs.
        device: what it computes on.
        devices: GPUs, or CPU slots, that it needs on each machine.
        checkpoint_dir: where it saves; empty = nowhere.
        notes: what the user should know before it starts.
        is_dry: whether it needs no cluster, for it computes nothing.
    """

    words: tuple[str, ...]
    is_megarl: bool
    name: str
    nodes: int
    device: Device
    devices: int
    checkpoint_dir: str = ""
    notes: tuple[str, ...] = ()
    is_dry: bool = False

    def command(self, python: str) -> list[str]:
        """The driver's command line."""
        return [python, "-m", "megarl.cli", *self.words] if self.is_megarl else list(self.words)


@dataclass(frozen=True)
class Ports:
    """Every port on which a node listens, all given to Ray, so that none is a surprise to a firewall.

    Attributes:
        first: the first of nine in a row.
        workers: lowest and highest port of Ray's workers.

    Raises:
        ConfigError: a port is none, or in both.
    """

    first: int = FIRST_PORT
    workers: tuple[int, int] = WORKER_PORTS

    def __post_init__(self) -> None:
        last, (low, high) = self.first + PORTS_PER_NODE - 1, self.workers
        if not (self.first >= 1024 and last < 65536 and 1024 <= low <= high < 65536):
            raise ConfigError(f"--port={self.first} and --worker-ports={low}-{high}: ports are from 1024 to 65535")
        if self.first <= high and low <= last:
            raise ConfigError(
                f"--port={self.first}: the ports from {self.first} to {last} overlap with --worker-ports={low}-{high}"
            )

    @property
    def gcs(self) -> int:
        """The cluster's address, on the head only."""
        return self.first

    @property
    def dashboard(self) -> int:
        """On the head's loopback interface only."""
        return self.first + 1

    @property
    def client(self) -> int:
        """Of Ray's server for programs outside of the cluster, which it always starts, on the head only."""
        return self.first + 2

    def of_node(self) -> dict[str, int]:
        """The options of ``ray start`` for what listens on each node."""
        names = (
            "node-manager-port",
            "object-manager-port",
            "runtime-env-agent-port",
            "dashboard-agent-grpc-port",
            "dashboard-agent-listen-port",
            "metrics-export-port",
        )
        return {name: self.first + 3 + index for index, name in enumerate(names)}


@dataclass(frozen=True)
class ClusterSettings:
    """How a cluster is started and followed.

    Attributes:
        hosts: the nodes; the first is the head.
        python: interpreter on the nodes.
        env: variables for everything that runs on the nodes.
        ports: of the head; nodes on one machine (loopback addresses) take the following ones.
        interface: network interface whose addresses the nodes use; empty = that of the host's name.
        head_address: address of the head, where it cannot be found out.
        object_store_bytes: shared memory for Ray's objects on each node; None = Ray's choice.
        start_timeout_s: until all nodes must be there.
        grace_s: for the driver to end by itself, once it was asked to.
        doctor: whether every node is checked before the job starts.
        log_folder: where Ray's logs of a run that failed go, on each node; empty = nowhere.
    """

    hosts: tuple[str, ...]
    python: str
    env: dict[str, str] = field(default_factory=dict)
    ports: Ports = field(default_factory=Ports)
    interface: str = ""
    head_address: str = ""
    object_store_bytes: int | None = None
    start_timeout_s: float = 300.0
    grace_s: float = 600.0
    doctor: bool = True
    log_folder: str = ""


def is_loopback(host: str) -> bool:
    """Whether a host is an address of this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether a host is given by its address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def node_ports(settings: ClusterSettings) -> dict[str, Ports]:
    """The ports of each host; those on one machine do not share any."""
    shift, found = 0, {}
    for host in settings.hosts:
        found[host] = Ports(settings.ports.first + shift, settings.ports.workers)
        shift += PORTS_PER_NODE if is_loopback(host) else 0
    return found


def ray_start(
    settings: ClusterSettings, job: JobToRun, host: str, address: str, head: str, ports: Ports, folder: str
) -> list[str]:
    """The command that is a node's Ray, for as long as it runs.

    Args:
        settings: of the cluster.
        job: says how many devices are needed.
        host: the node's name in the cluster.
        address: by which other nodes reach it; empty = Ray finds out.
        head: ``address:port`` of the cluster; empty on the head itself.
        ports: of this node.
        folder: for Ray's files.
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
        options["ray-client-server-port"] = ports.client
    if job.device == "cpu":
        options["num-cpus"] = job.devices  # GPUs are not given: Ray counts what is really there
    if settings.object_store_bytes is not None:
        options["object-store-memory"] = settings.object_store_bytes
    flags = [f"--{name}={value}" for name, value in options.items() if value != ""]
    start = [settings.python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    return [*start, *([] if head else ["--head"]), *flags]


def ray_environment(token_file: str, address: str = "", loopback: bool = False) -> dict[str, str]:
    """Variables for Ray and those who speak to it.

    Args:
        token_file: holds the cluster's token.
        address: of the cluster, for those who join it.
        loopback: the cluster is one machine's, and reachable from nowhere else.
    """
    found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file, "PYTHONUNBUFFERED": "1"}
    if address:
        found["RAY_ADDRESS"] = address
    if loopback:
        # Ray would take another address of this machine instead of 127.0.0.1; see megarl/cluster/session.py.
        found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return found
