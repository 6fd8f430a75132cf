"""All-reduce benchmark between processes: correctness and bus bandwidth, without a model.

As a program it is one rank: ``python -m megarl.ops.doctor.node.collective RANK WORLD HOST PORT BACKEND BYTES``.
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

from megarl.base.formatting import MIB
from megarl.base.ports import held_port
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status

SAMPLE_BYTES = {"gloo": 16 * MIB, "nccl": 256 * MIB}
ROUNDS = 5
JOIN_S = 60.0
SLOW_BYTES_PER_S = {"gloo": 50e6, "nccl": 10e9}
"""Bus bandwidth below which the check warns: gloo on loopback or 1 GbE is faster, and so is NCCL on any NVLink."""


class Bandwidth(NamedTuple):
    """Measurement of an all-reduce."""

    world: int  # ranks
    size: int  # bytes of the tensor
    seconds: float  # time of the fastest round
    correct: bool  # whether the sum is

    @property
    def bus(self) -> float:
        """Return the bus bandwidth in bytes/s: a ring sends ``2 (n - 1) / n`` of the tensor per link."""
        return 2 * (self.world - 1) / self.world * self.size / self.seconds


def all_reduce(rank: int, world: int, host: str, port: int, backend: str, size: int) -> Bandwidth:
    """Join the process group and sum a tensor over all ranks.

    Args:
        backend: ``gloo`` or ``nccl``; NCCL uses the first visible GPU.
        size: bytes of the tensor.

    Raises:
        RuntimeError: a rank did not join in time, or the connection broke.
    """
    import torch
    import torch.distributed as dist

    from megarl.base.rendezvous import join_rendezvous

    limit = timedelta(seconds=JOIN_S)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    store = join_rendezvous(host, port, rank, world, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    try:
        best, correct = float("inf"), True
        for _ in range(ROUNDS):
            tensor = torch.full((size // 4,), float(rank + 1), device=device)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            if backend == "nccl":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
            correct = correct and bool((tensor == world * (world + 1) / 2).all())
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return Bandwidth(world, size, best, correct)


def bandwidth_result(measured: Bandwidth, backend: str, scope: str) -> CheckResult:
    """Turn the slowest rank's measurement into a check result; ``scope`` says where the ranks are: ``on 2 nodes``."""
    name = f"all-reduce ({backend})"
    speed = f"{measured.bus / 1e9:.2f} GB/s bus bandwidth with {measured.size / MIB:.0f} MiB"
    observation = f"{measured.world} ranks {scope}: {speed}"
    if not measured.correct:
        return CheckResult(
            name, Status.FAIL, f"{observation}; the sum is wrong", "a GPU or a link is broken: test each one alone"
        )
    if measured.bus < SLOW_BYTES_PER_S[backend]:
        remedy = (
            "NCCL_DEBUG=INFO logs the route: select the fast network by NCCL_SOCKET_IFNAME and NCCL_IB_HCA, and check "
            "that GPUDirect (nvidia-peermem) is loaded"
            if backend == "nccl"
            else "select the fast network by GLOO_SOCKET_IFNAME"
        )
        return CheckResult(name, Status.WARN, observation, remedy)
    return CheckResult(name, Status.PASS, observation)


def failed_result(backend: str, error: str) -> CheckResult:
    """Return the check result of an all-reduce that failed."""
    remedy = (
        "open the ports between nodes, select the network by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO"
    )
    return CheckResult(f"all-reduce ({backend})", Status.FAIL, error, remedy)


def check_all_reduce(needs: Needs, gpus: int) -> list[CheckResult]:
    """Check an all-reduce between processes of this machine: one per GPU with NCCL, or two with gloo."""
    if needs.quick or gpus == 1:
        return []
    backend, world = ("nccl", min(gpus, needs.devices or gpus)) if gpus else ("gloo", 2)
    if world < 2:
        return []
    try:
        with held_port("127.0.0.1") as port:  # while the processes start
            measured = run_ranks(range(world), world, "127.0.0.1", port, backend)
        return [bandwidth_result(measured, backend, "on this node")]
    except RuntimeError as error:
        return [failed_result(backend, str(error))]


def run_ranks(ranks: range, world: int, host: str, port: int, backend: str) -> Bandwidth:
    """Run this machine's ranks, one process and GPU each; returns the measurement of the slowest.

    Raises:
        RuntimeError: a process failed; with the last line of its output.
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
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = visible[local] if visible else str(local)
    numbers = (rank, world, host, port, backend, SAMPLE_BYTES[backend])
    command = [sys.executable, "-m", __name__, *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def slowest(measurements: Iterable[Bandwidth]) -> Bandwidth:
    """Reduce the measurements of all ranks: the longest time; correct only if all are."""
    ranks = list(measurements)
    correct = all(measured.correct for measured in ranks)
    return max(ranks, key=lambda measured: measured.seconds)._replace(correct=correct)


def main(arguments: Sequence[str]) -> None:
    """Run one rank and print its measurement as JSON."""
    rank, world, host, port, backend, size = arguments
    print(json.dumps(all_reduce(int(rank), int(world), host, int(port), backend, int(size))))


if __name__ == "__main__":
    main(sys.argv[1:])
