"""Checks before Ray starts: the devices of this machine, and whether a Ray cluster answers at an address."""

from __future__ import annotations

import os
import socket
import time

from megarl.base.errors import ResourceError
from megarl.base.signals import sleep

PROBE_S = 3.0
"""Seconds in which a cluster must answer."""
NO_GPU_REMEDY = "run on a node with GPUs and a driver (a container: --gpus all), or set trainer.device=cpu"
"""Remedy for a job that needs GPUs on a machine without one."""
_RETRY_S = 0.3
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""Start of a gRPC connection: HTTP/2's preface, and an empty SETTINGS frame."""
_SETTINGS = 4


def available_cpus() -> int:
    """Count the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_node() -> dict[str, float]:
    """Return the CPU cores and the visible GPUs of this machine (``CUDA_VISIBLE_DEVICES``), for a local Ray."""
    from megarl.cluster.ray_internals import gpu_count

    return {"CPU": float(available_cpus()), "GPU": float(gpu_count())}


def check_cluster_answers(address: str, timeout_s: float = PROBE_S) -> None:
    """Check that a Ray cluster answers at an address; ``ray.init`` itself waits for minutes.

    Args:
        address: ``host:port`` or ``ray://host:port``; ``auto`` and ``local``, which Ray resolves, are not checked.

    Raises:
        ResourceError: there is no such host, nothing listens at the port, or another program or a hung process does.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise unreachable(address, "it is not of the form host:port")
    deadline, problem = time.monotonic() + timeout_s, ""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise unreachable(address, f"{problem or 'no answer'}, tried for {timeout_s:g} s")
        try:
            if _is_grpc_server(host.strip("[]"), int(port), left):
                return
            problem = "the port accepts connections, but no gRPC server answers there"
        except TimeoutError:
            problem = "no answer"
        except OSError as error:
            problem = error.strerror or str(error)
        sleep(min(_RETRY_S, deadline - time.monotonic()))


def unreachable(address: str, problem: str) -> ResourceError:
    """Build the error for a cluster that does not answer."""
    return ResourceError(
        f"no Ray cluster answers at {address}: {problem}. Start one there (`ray start --head`, or `megarl "
        "launch`), or unset RAY_ADDRESS: the run then starts Ray on this machine",
        code="ray.no-cluster",
    )


def not_joined(address: str, problem: str) -> ResourceError:
    """Build the error for a cluster that this process cannot join; Ray's own error does not mention a missing token."""
    mode = os.environ.get("RAY_AUTH_MODE")
    return ResourceError(
        f"cannot join the Ray cluster at {address}: {problem}. Usual cause: the cluster uses token authentication "
        "(`ray start --head` turns it on if ~/.ray/auth_token exists), and RAY_AUTH_MODE is "
        f"{'not set' if mode is None else repr(mode)} here: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH if the "
        "cluster's token is in another file. To start Ray on this machine, unset RAY_ADDRESS",
        code="ray.not-joined",
    )


def _is_grpc_server(host: str, port: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return True  # the answer would need the certificates
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.sendall(_PREFACE)
        header = connection.recv(9)  # length in three bytes, type, flags, stream
        return len(header) > 3 and header[3] == _SETTINGS
