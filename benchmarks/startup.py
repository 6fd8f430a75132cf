"""Seconds from the command to the first training step, and where they go.

    python benchmarks/startup.py                       imports, then the quickstart's job with and without fork server
    python benchmarks/startup.py --repeat 5 --only imports

The first table has the CPU seconds that a fresh process spends on imports, each row on top of the row above. The second
has one PPO job of the quickstart's configuration with a random model, ended after its first step: wall seconds from the
command to each stage, and CPU seconds by kind of process. Medians over ``--repeat`` runs. Run it on an idle machine:
wall seconds of a busy one say nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil
from machine import benchmark_parser, parse_sizes

ROOT = Path(__file__).resolve().parents[1]
MARK = "MEGARL_STARTUP_RUN"
IMPORTS = {
    "worker": ("ray", "torch", "megarl.megatron", "megarl.workers.actor", "megarl.cluster.worker_process"),
    "driver": ("megarl.cli", "torch", "ray", "transformers.AutoTokenizer", "megarl.trainer.jobs.train"),
}
STAGES = {
    "first line of output": "",
    "workers started": "start workers",
    "first step done": "step 1/1",
}
POLL_S = 0.02
CPU_POLL_S = 0.5  # reading the processes takes CPU time from them


def import_seconds(modules: Sequence[str]) -> list[float]:
    """CPU seconds of each import in a fresh process, in order; the first includes the interpreter."""
    lines = ["import gc, resource, warnings", "warnings.simplefilter('ignore')", "seconds = []"]
    lines.append("gc.disable()")  # as megarl.base.packages
    for module in modules:
        package, _, name = module.rpartition(".")
        lines.append(f"from {package} import {name}" if name[:1].isupper() else f"import {module}")
        lines.append("seconds.append(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, "print(*seconds)"])],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    totals = [float(word) for word in done.stdout.split()]
    return [after - before for before, after in zip([0.0, *totals], totals, strict=False)]


def kind_of(process: psutil.Process) -> str:
    """Kind of a process of a job, for the table."""
    command = " ".join(process.cmdline())
    if "megarl.cluster.fork_server" in command:
        return "fork server"
    if "-m megarl train" in command:
        return "driver"
    if "ray::" in command or "default_worker" in command or "setup_worker" in command or "ray_programs" in command:
        return "workers"
    if "ray" in command:
        return "Ray's own"
    return "others (rewards, trackers)"


def run_job(task: Path, folder: Path, fork: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Run one training step; returns wall seconds by stage and CPU seconds by kind of process."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "megarl", "train", "--config-name", "quickstart", "trainer.total_training_steps=1"]
    command += [f"actor_rollout_ref.model.path={task}/model", f"data.train_files={task}/data/train.parquet"]
    command += ["data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    command += ["trainer.hf_export_dir=null", f"hydra.run.dir={folder}/run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, "MEGARL_FORK_SERVER": str(int(fork))}
    cpu: dict[tuple[int, float], tuple[str, float]] = {}
    stages: dict[str, float] = {}
    begin = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        output, counted = "", 0.0
        while process.poll() is None:
            output += (process.stdout.read() or b"").decode(errors="replace")
            for stage, text in STAGES.items():
                if stage not in stages and output and text in output:
                    stages[stage] = time.perf_counter() - begin
            if "first step done" not in stages and time.perf_counter() - counted > CPU_POLL_S:
                counted = time.perf_counter()
                _count_cpu(mark, cpu)
            time.sleep(POLL_S)
        if process.returncode or "first step done" not in stages:
            raise SystemExit(f"the job failed ({process.returncode}):\n{output}")
    by_kind: dict[str, float] = defaultdict(float)
    for kind, seconds in cpu.values():
        by_kind[kind] += seconds
    return stages, by_kind


def _count_cpu(mark: str, cpu: dict[tuple[int, float], tuple[str, float]]) -> None:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                times = process.cpu_times()
                cpu[process.pid, process.create_time()] = (kind_of(process), times.user + times.system)
        except psutil.Error:
            continue


def _print_imports(repeat: int, processes: Sequence[str]) -> None:
    print("CPU seconds of imports in a fresh process")
    for process in processes:
        modules = IMPORTS[process]
        runs = [import_seconds(modules) for _ in range(repeat)]
        medians = [statistics.median(column) for column in zip(*runs, strict=True)]
        for module, seconds in zip(modules, medians, strict=True):
            print(f"  {process:8s} {module:36s} {seconds:6.2f}")
        print(f"  {process:8s} {'total':36s} {sum(medians):6.2f}")


def _print_jobs(repeat: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        task = Path(scratch, "task")
        make = [sys.executable, str(ROOT / "tools" / "make_arithmetic.py"), "--out", str(task)]
        subprocess.run(make, check=True, capture_output=True)
        results: dict[bool, list[tuple[dict[str, float], dict[str, float]]]] = {True: [], False: []}
        for number in range(repeat):
            for fork in results:  # in turns, so that both see the same machine
                folder = Path(scratch, f"{number}-{fork}")
                folder.mkdir()
                results[fork].append(run_job(task, folder, fork))
    print(f"\nOne PPO job of five workers up to its first step\n  {'':34s} {'forked':>8s} {'started':>8s}")
    for part, unit in ((0, "wall s to"), (1, "CPU s of")):
        rows = dict.fromkeys(name for runs in results.values() for run in runs for name in run[part])
        for name in rows:
            cells = [statistics.median(run[part].get(name, 0.0) for run in results[fork]) for fork in (True, False)]
            print(f"  {f'{unit} {name}':34s} {cells[0]:8.1f} {cells[1]:8.1f}")


def main() -> None:
    """Print both tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    parser.add_argument("--only", choices=["imports", "job"], help="one of the tables")
    parser.add_argument("--processes", nargs="+", choices=list(IMPORTS), default=list(IMPORTS), help="whose imports")
    options = parse_sizes(parser, repeat=1, only="imports", processes=["worker"])
    if options.only != "job":
        _print_imports(options.repeat, options.processes)
    if options.only != "imports":
        _print_jobs(options.repeat)


if __name__ == "__main__":
    main()
