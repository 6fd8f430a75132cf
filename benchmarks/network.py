"""What a network's rate does to a run: the bytes that a step moves between hosts, and its seconds at several rates.

    python benchmarks/network.py --parts plans                        # any machine
    python benchmarks/network.py --parts columns jobs --hosts 2       # needs root

``plans`` counts, without processes, the token columns that hosts of eight ranks read from each other in a GRPO step.
Three ways stand side by side: passes that balance their rows by themselves, passes with the rows of the update, as
megarl runs them, and the lower bound, in which each value that a host computes and another host reads crosses once.

``columns`` and ``jobs`` run on the hosts of ``tests/testbed/hosts.sh`` (network namespaces of this machine), whose
interfaces count the bytes, and ``tc`` limits their rate in both directions. ``columns`` runs the verbs of a step on
null workers over all hosts, with the plan's count beside the interfaces'. ``jobs`` runs GRPO jobs whose network changes
its rate every few steps. ``sync`` trains on one host for an engine on the other; ``dp`` and ``tp`` have a rank on each
of two hosts, data-parallel or tensor-parallel. Figures are medians over the steps at a rate, without the first of them.
The bound of a phase is the time of its bytes at the rate, on the host that receives most. The hosts share the cores of
this machine: compare rows, not seconds with those of another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from column_traffic import MINI_BATCHES, PASSES, CountedGroup, RandomAnswers, drawn_batch, run_step
from machine import benchmark_parser, parse_sizes, processor

from megarl.base.formatting import table_lines
from megarl.cluster.fork_server import fork_server
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.models import ParallelLayout
from megarl.tracing import span
from megarl.tracing.trace_file import read_trace
from megarl.tracking import read_metrics
from megarl.trainer.callbacks import Callback, TrainerView

ROOT = Path(__file__).resolve().parents[1]
TESTBED = ROOT / "tests" / "testbed" / "hosts.sh"
PROGRAMS = ("ip", "tc", "sshd", "munged", "slurmd")
LAYOUTS = {
    "sync": (
        "trainer.nnodes=1",
        "async_training.mode=disaggregated",
        "async_training.max_staleness=1",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    ),
    "dp": ("trainer.nnodes=2", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"),
    "tp": ("trainer.nnodes=2", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"),
}
"""Overrides of the jobs."""
SAMPLE_S = 0.01


def counted(args: argparse.Namespace, samples: int, hosts: int, ranks: int, aligned: bool) -> CountedGroup:
    """Count the bytes of a step."""
    group = CountedGroup(hosts, ranks)
    run_step(group, drawn_batch(samples, args.longest, args.mean, aligned), group.measure)
    return group


def megabytes(values: Sequence[float]) -> str:
    """Format bytes of all hosts."""
    return f"{sum(values) / 1e6:,.1f}"


def print_plans(args: argparse.Namespace) -> None:
    """Print the bytes of a step by the rows of its passes."""
    header = [
        "samples",
        "hosts x ranks",
        "passes' rows",
        "passes MB",
        "update MB",
        "busiest host MB",
        "bound MB",
        "ratio",
    ]
    rows = []
    for samples in args.samples:
        for hosts in args.plan_hosts:
            for aligned in (False, True):
                group = counted(args, samples, hosts, args.ranks, aligned)
                passes = [sum(values) for name, values in group.moved.items() if name != "update_actor"]
                of_hosts = [sum(values) for values in zip(*group.moved.values(), strict=True)]
                bound = sum(map(sum, group.needed.values()))
                cells = [f"{samples:,}", f"{hosts} x {args.ranks}", "update's" if aligned else "own", megabytes(passes)]
                cells += [megabytes(group.moved["update_actor"]), megabytes([max(of_hosts)]), megabytes([bound])]
                rows.append([*cells, f"{sum(of_hosts) / bound:.2f}"])
    print(f"\nToken columns of a GRPO step between hosts, {MINI_BATCHES} mini-batches, MB received by all hosts")
    print("\n".join(table_lines([header, *rows], "<<<>>>>>")), flush=True)


class Bed:
    """The testbed's hosts and the counters of their interfaces."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder, self.names = folder, [f"h{number + 1}" for number in range(hosts)]
        shared = " ".join(map(str, (ROOT, Path(sys.prefix), folder)))
        self.environment = {**os.environ, "BED": str(folder / "bed"), "BED_SHARE": shared}
        lines = self("up", str(hosts)).splitlines()
        self.pids = {line.split()[0]: int(line.split()[-1]) for line in lines}
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._ends = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def __call__(self, *words: str) -> str:
        """Run a command of ``hosts.sh``."""
        command = ["bash", str(TESTBED), *words]
        return subprocess.run(command, env=self.environment, text=True, stdout=subprocess.PIPE, check=True).stdout

    def close(self) -> None:
        """Remove the hosts."""
        self._ends.set()
        self._sampler.join()
        self("down")

    def limit(self, rate: int) -> None:
        """Limit all hosts to some MB/s in both directions; 0 = no limit."""
        burst = max(512_000, rate * 4000)  # what passes between two ticks of the kernel's clock
        words = ["tbf", "rate", f"{rate * 8}mbit", "burst", str(burst), "latency", "100ms"] if rate else []
        for name in self.names:
            self("shape", name, *words)

    def start(self, output: Path, options: Sequence[str], command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a launch on the first host."""
        path = f"{ROOT}:{ROOT}/benchmarks"
        words = ["on", "h1", "env", "-C", str(self.folder), f"PYTHONPATH={path}", "OMP_NUM_THREADS=1", sys.executable]
        words += ["-m", "megarl.ops.launch", "--env", "PYTHONPATH", "--env", "OMP_NUM_THREADS", "--no-doctor"]
        words += ["--hosts", ",".join(self.names), *options, *command]
        with output.open("wb") as file:
            command = ["bash", str(TESTBED), *words]
            return subprocess.Popen(command, env=self.environment, stdout=file, stderr=subprocess.STDOUT)

    def received(self, host: str, begin: float, end: float) -> int:
        """Return the bytes that a host received between two Unix times."""
        times = [sample[0] for sample in self.samples]
        first, last = (min(bisect_left(times, moment), len(times) - 1) for moment in (begin, end))
        return self.samples[last][1][host] - self.samples[first][1][host]

    def _sample(self) -> None:
        while not self._ends.wait(SAMPLE_S):
            self.samples.append((time.time(), {name: self._received(pid) for name, pid in self.pids.items()}))

    @staticmethod
    def _received(pid: int) -> int:
        """Return the bytes that a host's interface has received."""
        lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines()
        return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("eth0:"))


@contextmanager
def testbed(hosts: int) -> Iterator[Bed]:
    """Start the hosts."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "megarl").symlink_to(ROOT / "megarl")  # this checkout, whichever the environment has installed
        bed = Bed(folder, hosts)
        try:
            yield bed
        finally:
            bed.close()


def finished(process: subprocess.Popen[bytes], output: Path) -> str:
    """Wait for a launch, and return its output."""
    code, text = process.wait(), output.read_text(encoding="utf-8", errors="replace")
    if code:
        raise SystemExit(f"a launch on the testbed ended with {code}:\n{text}")
    return text


def inside_columns(args: argparse.Namespace) -> None:
    """Run steps on null workers of this cluster, and print the times of each stage."""
    torch.set_num_threads(1)
    with fork_server(), RaySession() as session:
        pool = session.place([ResourcePool("main", "cpu", [args.ranks] * args.hosts)])["main"]
        group = WorkerGroup("actor", RandomAnswers, {}, ParallelLayout(dp=args.hosts * args.ranks), pool)
        wait_ready([group])
        hosts = [group.processes[rank].host for rank in group.ranks]
        for step in range(args.steps):
            batch = drawn_batch(args.samples[0], args.longest, args.mean, not args.own_rows, step)

            def measure(stage: str, work: Callable[[], Any], step: int = step) -> Any:
                begin = time.time()
                result = work()
                time.sleep(4 * SAMPLE_S)  # the counters are read meanwhile
                line = {"step": step, "stage": stage, "begin": begin, "end": time.time(), "hosts": hosts}
                print("STAGE", json.dumps(line), flush=True)
                return result

            run_step(group, batch, measure)
        group.shutdown()


def print_columns(args: argparse.Namespace) -> None:
    """Print the bytes of the stages of a step on null workers, as the interfaces count them."""
    stages = [*PASSES, "advantages", "update_actor", "metrics"]
    rows = []
    with testbed(args.hosts) as bed:
        for own in (True, False):
            options = [
                "--nodes",
                str(args.hosts),
                "--devices-per-node",
                str(args.ranks),
                "--device",
                "cpu",
                "--",
                "python",
            ]
            command = [
                str(Path(__file__).resolve()),
                "--inside",
                "--hosts",
                str(args.hosts),
                "--ranks",
                str(args.ranks),
            ]
            command += ["--samples", str(args.samples[0]), "--longest", str(args.longest), "--mean", str(args.mean)]
            command += ["--steps", str(args.steps), *(["--own-rows"] if own else [])]
            output = bed.folder / "columns.txt"
            text = finished(bed.start(output, options, command), output)
            times = [json.loads(line.split("STAGE ")[1]) for line in text.splitlines() if "STAGE {" in line]
            received: dict[str, list[float]] = defaultdict(list)
            for one in times:
                of_hosts = [bed.received(name, one["begin"], one["end"]) for name in bed.names]
                received[one["stage"]].append(sum(of_hosts))
            plan = counted(args, args.samples[0], args.hosts, args.ranks, not own)
            for stage in stages:
                cells = ["own" if own else "update's", stage, megabytes([statistics.median(received[stage])])]
                rows.append([*cells, megabytes(plan.moved[stage]), megabytes(plan.needed[stage])])
    print(f"\nToken columns of {args.samples[0]} samples over {args.hosts} hosts of {args.ranks} ranks, MB received")
    header = ["passes' rows", "stage", "interfaces MB", "plan MB", "bound MB"]
    print("\n".join(table_lines([header, *rows], "<<>>>")), flush=True)


class Clock(Callback):
    """Notes the Unix time in the timeline of a job."""

    def on_train_start(self, view: TrainerView) -> None:
        """Record a span with the time."""
        with span("clock", "benchmark", unix_s=time.time()):
            pass


def job_overrides(args: argparse.Namespace, folder: Path, layout: str, steps: int) -> list[str]:
    """Return the command line of a job."""
    run = folder / layout
    return [
        *("train", "--config-name", "quickstart_grpo", "trainer.n_gpus_per_node=1", *LAYOUTS[layout]),
        f"actor_rollout_ref.model.path={folder}/task/model",
        f"data.train_files={folder}/task/data/train.parquet",
        *("data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        f"data.train_batch_size={args.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        *("actor_rollout_ref.rollout.n=4", "sync.verify_freq=0", "trainer.hf_export_dir=null"),
        *("trainer.logger=[jsonl]", "trainer.timeline.enable=true", f"trainer.total_training_steps={steps}"),
        f"trainer.callbacks=[{Path(__file__).resolve()}:{Clock.__name__}]",
        f"hydra.run.dir={run}",
    ]


def wait_for_step(process: subprocess.Popen[bytes], file: Path, step: int) -> None:
    """Wait until a job has ended a step, or failed."""
    while process.poll() is None and (not file.exists() or len(read_metrics(file)) < step):
        time.sleep(0.1)


def phase_times(folder: Path) -> list[tuple[str, float, float]]:
    """Return the phases of a job with their begin and end in Unix time."""
    events = [event for event in read_trace(folder) if event.get("ph") == "X" and event["pid"] == 0]
    clock = next(event for event in events if event["name"] == "clock")
    origin = clock["args"]["unix_s"] - clock["ts"] / 1e6
    phases = [event for event in events if event.get("cat") == "phase"]
    phases.sort(key=lambda event: event["ts"])
    return [(one["name"], origin + one["ts"] / 1e6, origin + (one["ts"] + one["dur"]) / 1e6) for one in phases]


def print_job(args: argparse.Namespace, layout: str) -> None:
    """Run a job, change the network's rate on its way, and print seconds and bytes of its phases at each rate."""
    steps = (args.steps + 1) * len(args.rates)
    with testbed(2) as bed:
        task = ["--out", str(bed.folder / "task"), "--hidden", str(args.hidden), "--layers", str(args.layers)]
        tool = [sys.executable, str(ROOT / "tools" / "make_arithmetic.py"), *task, "--lessons", "60", "60"]
        subprocess.run(tool, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        output, metrics = bed.folder / "job.txt", bed.folder / layout / "metrics.jsonl"
        bed.limit(args.rates[0])
        process = bed.start(output, [], job_overrides(args, bed.folder, layout, steps))
        for number, rate in enumerate(args.rates[1:], 1):
            wait_for_step(process, metrics, number * (args.steps + 1))
            bed.limit(rate)
        finished(process, output)
        spans = phase_times(bed.folder / layout)
        print(f"\n{layout}: {' '.join(LAYOUTS[layout])}")
        header = ["MB/s", "phase", "s", *(f"MB to {name}" for name in bed.names), "bound s", "bound / s"]
        table = []
        for number, rate in enumerate(args.rates):
            first = number * (args.steps + 1) + 2
            table += rate_rows(bed, spans, rate, range(first, first + args.steps))
        print("\n".join(table_lines([header, *table], ">")), flush=True)


def rate_rows(bed: Bed, spans: Sequence[tuple[str, float, float]], rate: int, steps: Sequence[int]) -> list[list[str]]:
    """Return the table's lines of a rate: medians over steps."""
    whole = [times for times in spans if times[0] == "step"]
    chosen = [whole[step - 1] for step in steps]
    lines = []
    for name in dict.fromkeys(name for name, _, _ in spans):
        found = [[one for one in spans if one[0] == name and step[1] <= one[1] < step[2]] for step in chosen]
        if not all(found):
            continue
        seconds = [sum(end - begin for _, begin, end in of_step) for of_step in found]
        received = [
            [sum(bed.received(host, begin, end) for _, begin, end in of_step) for of_step in found]
            for host in bed.names
        ]
        line = [f"{rate or 'none'}", name, f"{statistics.median(seconds):.2f}"]
        line += [megabytes([statistics.median(of_host)]) for of_host in received]
        if rate:
            bound = max(statistics.median(of_host) for of_host in received) / 1e6 / rate
            line += [f"{bound:.2f}", f"{bound / statistics.median(seconds):.0%}"]
        lines.append(line)
    return lines


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=("plans", "columns", "jobs"), default=["plans", "columns", "jobs"]
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[2048, 16384], help="of plans; columns run the first")
    parser.add_argument("--longest", type=int, default=32768, help="longest response in tokens")
    parser.add_argument("--mean", type=int, default=4096, help="mean response in tokens")
    parser.add_argument("--plan-hosts", type=int, nargs="+", default=[2, 8, 64], help="hosts of the plans")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks per host")
    parser.add_argument("--hosts", type=int, default=2, help="hosts of the columns on the testbed")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="jobs")
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 1000, 100, 50], help="MB/s; 0 = no limit")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of columns, and at each rate of jobs")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a job's step")
    parser.add_argument("--hidden", type=int, default=512, help="width of the jobs' model")
    parser.add_argument("--layers", type=int, default=8, help="layers of the jobs' model")
    parser.add_argument("--own-rows", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parse_sizes(parser, parts=["plans"], samples=[64], longest=32, mean=16, plan_hosts=[2], ranks=2)
    if args.inside:
        inside_columns(args)
        return
    if set(args.parts) != {"plans"}:
        missing = [
            name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
        ]
        if os.geteuid() != 0 or missing:
            lacks = f"; missing: {', '.join(missing)}" if missing else ""
            parser.error(f"--parts columns and jobs need root and the programs {', '.join(PROGRAMS)}{lacks}")
    print(f"{processor()}, {os.cpu_count()} cores", flush=True)
    if "plans" in args.parts:
        print_plans(args)
    if "columns" in args.parts:
        print_columns(args)
    for layout in args.layouts if "jobs" in args.parts else ():
        print_job(args, layout)


if __name__ == "__main__":
    main()
