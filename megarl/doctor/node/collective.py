"""An all-reduce between processes, with its bandwidth: what training does, without a model.

Run as a program it is one rank: ``python -m megarl.doctor.node.collective RANK WORLD HOST PORT BACKEND BYTES``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

from megarl.amounts import MIB
from megarl.doctor.node.finding import Finding, Status
from megarl.doctor.node.needs import Needs
from megarl.ports import free_port

SAMPLE_BYTES = {"gloo": 16 * MIB, "nccl": 256 * MIB}
ROUNDS = 5
JOIN_S = 60.0
SLOW_BYTES_PER_S = {"gloo": 50e6, "nccl": 10e9}
"""Bus bandwidth below which something is wrong: gloo on loopback or 1 GbE has more, NCCL on any NVLink, too."""


class Bandwidth(NamedTuple):
    """What an all-reduce reached.

    Attributes:
        world: ranks.
        size: bytes of the tensor that is summed.
        seconds: of the fastest round.
        right: whether the sum is what it has to be.
    """

    world: int
    size: int
    seconds: float
    right: bool

    @property
    def bus(self) -> float:
        """Bytes per second through a rank's link: a ring sends ``2 (n - 1) / n`` of the tensor over each."""
        return 2 * (self.world - 1) / self.world * self.size / self.seconds


def all_reduce(rank: int, world: int, host: str, port: int, backend: str, size: int) -> Bandwidth:
    """Joins the other ranks and sums a tensor with them.

    Args:
        rank: of this process.
        world: how many join.
        host: address of rank 0, which listens there.
        port: that it listens on.
        backend: ``gloo`` or ``nccl``; the latter uses this process's first GPU.
        size: bytes of the tensor.

    Raises:
        RuntimeError: the others did not come in time, or the connection broke.
    """
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=JOIN_S)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    store = dist.TCPStore(host, port, world, rank == 0, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    try:
        best, right = float("inf"), True
        for _ in range(ROUNDS):
            tensor = torch.full((size // 4,), float(rank + 1), device=device)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            if backend == "nccl":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
            right = right and bool((tensor == world * (world + 1) / 2).all())
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return Bandwidth(world, size, best, right)


def finding_of(done: Bandwidth, backend: str, where: str) -> Finding:
    """An all-reduce as a finding."""
    name = f"all-reduce ({backend})"
    found = f"{done.world} ranks {where}: {done.bus / 1e9:.2f} GB/s bus bandwidth with {done.size / MIB:.0f} MiB"
    if not done.right:
        return Finding(
            name, Status.FAIL, f"{found}; the sum is wrong", "a GPU or a link is broken: test each by itself"
        )
    if done.bus < SLOW_BYTES_PER_S[backend]:
        remedy = (
            "NCCL_DEBUG=INFO tells which way it takes: name the fast network by NCCL_SOCKET_IFNAME and NCCL_IB_HCA, "
            "and see that GPUDirect (nvidia-peermem) is loaded"
            if backend == "nccl"
            else "name the fast network by GLOO_SOCKET_IFNAME"
        )
        return Finding(name, Status.WARN, found, remedy)
    return Finding(name, Status.PASS, found)


def failure(backend: str, error: str) -> Finding:
    """The finding of an all-reduce that did not come to its end."""
    remedy = (
        "open the ports between nodes, name the network by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO"
    )
    return Finding(f"all-reduce ({backend})", Status.FAIL, error, remedy)


def check_all_reduce(needs: Needs, gpus: int) -> list[Finding]:
    """An all-reduce between processes of this machine: one per GPU by NCCL, or two by gloo."""
    if needs.quick or gpus == 1:
        return []
    backend, world = ("nccl", min(gpus, needs.devices or gpus)) if gpus else ("gloo", 2)
    if world < 2:
        return []
    try:
        return [finding_of(local_all_reduce(backend, world), backend, "on this node")]
    except RuntimeError as error:
        return [failure(backend, str(error))]


def local_all_reduce(backend: str, world: int) -> Bandwidth:
    """The all-reduce between new processes of this machine.

    Raises:
        RuntimeError: one of them failed; with the end of what it printed.
    """
    return run_ranks(range(world), world, "127.0.0.1", free_port(), backend)


def run_ranks(ranks: range, world: int, host: str, port: int, backend: str) -> Bandwidth:
    """This machine's ranks of an all-reduce, each a new process, with a GPU of its own where the backend is NCCL.

    Args:
        ranks: of this machine.
        world: ranks on all machines.
        host: where rank 0 listens.
        port: that it listens on.
        backend: ``gloo`` or ``nccl``.

    Returns:
        What the slowest of them measured.

    Raises:
        RuntimeError: one of them failed; with the end of what it printed.
    """
    processes = [_start(rank, rank - ranks.start, world, host, port, backend) for rank in ranks]
    try:
        outputs = [process.communicate(timeout=2 * JOIN_S) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks did not end within {2 * JOIN_S:.0f} s") from error
    finally:
        for process in processes:
            process.kill()
    for rank, process, (_, text) in zip(ranks, processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"rank {rank}: {(text.strip().splitlines() or ['no message'])[-1]}")
    return slowest(Bandwidth(*json.loads(out.splitlines()[-1])) for out, _ in outputs)


def _start(rank: int, local: int, world: int, host: str, port: int, backend: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "nccl":
        environment["CUDA_VISIBLE_DEVICES"] = _visible(local)
    numbers = (rank, world, host, port, backend, SAMPLE_BYTES[backend])
    command = [sys.executable, "-m", __name__, *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def slowest(each: Iterable[Bandwidth]) -> Bandwidth:
    """Of what ranks measured: the time of the slowest, and right only if all are."""
    ranks = list(each)
    return max(ranks, key=lambda done: done.seconds)._replace(right=all(done.right for done in ranks))


def _visible(local: int) -> str:
    """The GPU of a machine's n-th rank, among those that this process may use."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[local] if named else str(local)


def main(arguments: Sequence[str]) -> None:
    """One rank: its measurement as JSON on the standard output."""
    rank, world, host, port, backend, size = arguments
    print(json.dumps(all_reduce(int(rank), int(world), host, int(port), backend, int(size))))


if __name__ == "__main__":
    main(sys.argv[1:])
