"""Memory of every process of a run over many steps: which one grows, and by how much per step.

    python benchmarks/soak.py                         150 steps of a tiny PPO job on CPU, about 3 minutes
    python benchmarks/soak.py --steps 500 --limit 10  as many of the steps as fit into 10 minutes
    python benchmarks/soak.py --steps 500 -- algorithm.adv_estimator=grpo trainer.watchdog.timeout_s=null

Arguments after ``--`` are overrides of the configuration. After each step but the last, the private memory (USS) of
every process is read. The table has one line per process: memory after the first third of the steps, memory at the
end, and the slope between the two, as the median over all pairs of steps, so that single jumps do not count.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
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
MARK = "MEGARL_SOAK_RUN"
TASK = ["--hidden", "32", "--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60"]
POLL_S = 0.05

Readings = dict[tuple[int, str], dict[int, float]]
"""MB by step of each process, by process id and name."""


def name_of(process: psutil.Process) -> str:
    """Short name of a process of a job."""
    words = process.cmdline()
    command = " ".join(words)
    for part, name in (
        ("gcs_server", "Ray: GCS"),
        ("raylet", "Ray: raylet"),
        ("megarl.cluster.fork_server", "fork server"),
        ("-m megarl train", "driver"),
    ):
        if part in (words[0] if name.startswith("Ray") else command):
            return name
    # Ray appends the current method to the title of an actor.
    title = words[0].removeprefix("ray::").split(".")[0]
    return title if words[0].startswith("ray::") else Path(words[0]).name


def read_memory(mark: str, step: int, readings: Readings) -> None:
    """Add the private memory of all processes of a run after a step."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                megabytes = process.memory_full_info().uss / 1e6
                readings[process.pid, name_of(process)][step] = megabytes
        except (psutil.Error, IndexError):
            continue


def run_job(steps: int, overrides: Sequence[str], scratch: Path, limit_s: float = math.inf) -> Readings:
    """Run the job, and read the memory of its processes after each step.

    Args:
        steps: training steps.
        overrides: of the configuration.
        scratch: folder for task and run.
        limit_s: seconds after which the job ends with its current step.
    """
    task, run, mark = scratch / "task", scratch / "run", uuid.uuid4().hex
    make = [sys.executable, str(ROOT / "tools" / "make_arithmetic.py"), "--out", str(task), *TASK]
    subprocess.run(make, check=True, capture_output=True)
    command = [sys.executable, "-m", "megarl", "train", "--config-name", "quickstart", f"hydra.run.dir={run}"]
    command += [f"actor_rollout_ref.model.path={task}/model", f"data.train_files={task}/data/train.parquet"]
    command += ["data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    command += ["trainer.hf_export_dir=null", "data.train_batch_size=24", "actor_rollout_ref.rollout.n=2"]
    command += ["actor_rollout_ref.actor.ppo_mini_batch_size=12", "trainer.total_epochs=100000"]
    command += [f"trainer.total_training_steps={steps}", "trainer.quiet=true", *overrides]
    readings: Readings = defaultdict(dict)
    with (scratch / "output.txt").open("wb") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
        process = subprocess.Popen(command, cwd=scratch, env=environment, stdout=output, stderr=subprocess.STDOUT)
        done, metrics = 0, run / "metrics.jsonl"
        deadline = time.monotonic() + limit_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                deadline = math.inf
                process.terminate()
            written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if done < written < steps:  # after the last step the processes end
                done = written
                read_memory(mark, done, readings)
            time.sleep(POLL_S)
    if process.returncode not in (0, 128 + signal.SIGTERM if math.isfinite(limit_s) else 0):
        raise SystemExit(
            f"the job failed ({process.returncode}):\n{(scratch / 'output.txt').read_text(encoding='utf-8')[-4000:]}"
        )
    return readings


def slope(points: dict[int, float]) -> float:
    """Median slope over all pairs of steps (Theil and Sen), in MB per step."""
    pairs = itertools.combinations(sorted(points.items())[:: max(1, len(points) // 100)], 2)
    return statistics.median((after - before) / (last - first) for (first, before), (last, after) in pairs)


def main() -> None:
    """Run the job and print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="MINUTES", help="end after this time")
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration, after --")
    options = parse_sizes(parser, steps=5)
    with tempfile.TemporaryDirectory() as scratch:
        readings = run_job(options.steps, options.overrides, Path(scratch), 60.0 * options.limit)
    last = max(step for points in readings.values() for step in points)
    first = last // 3
    print(f"{'process':30s} {'pid':>8s} {f'MB at {first}':>12s} {f'MB at {last}':>12s} {'KB per step':>12s}")
    for (pid, name), points in sorted(readings.items(), key=lambda item: item[0][1]):
        late = {step: megabytes for step, megabytes in points.items() if step >= first}
        if len(late) < 3:
            continue
        steps = sorted(late)
        print(f"{name:30s} {pid:8d} {late[steps[0]]:12.1f} {late[steps[-1]]:12.1f} {1000 * slope(late):12.1f}")


if __name__ == "__main__":
    main()
