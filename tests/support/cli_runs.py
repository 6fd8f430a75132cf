"""Runs jobs from the command line in separate processes, and reads the files of a run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megarl.base.processes import READ_ERRORS, all_processes, command_line, has_ended
from megarl.trainer.state.stopping import KILLED, RAY_LOST
from support.interrupts import restore_interrupts
from support.waits import wait_while
from support.warm_drivers import Drivers, WarmDriver

ROOT = Path(__file__).resolve().parents[2]
REWARDS = ROOT / "tests" / "e2e" / "reward_functions.py"
# One process scores the samples in order, for reward functions that count and pause.
ONE_BY_ONE = ("reward.num_workers=1", "reward.timeout_s=600", "reward.max_retries=0")
# Environment variable that marks all processes of a run: they inherit it however they are started.
MARK = "MEGARL_E2E_RUN"
START_S = 240.0  # Ray and five processes with torch start slowly on a loaded machine


class CliRun:
    """A running job in a separate working folder.

    Args:
        folder: working folder of the job.
        arguments: command-line arguments after ``megarl <job>``.
        env: environment variables in addition to those of this process.
        job: ``train`` or ``evaluate``.
        server: forks the driver; None = the driver is a process of its own.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        job: str = "train",
        server: Drivers | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.arguments = list(arguments)
        self.mark = uuid.uuid4().hex
        self.output_file = folder / f"output-{self.mark[:8]}.txt"
        command = ["megarl", job, *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {}), MARK: self.mark}
        self.process: subprocess.Popen[bytes] | WarmDriver
        # The driver begins a session: a signal to its process group acts like Ctrl-C in a terminal.
        with self.output_file.open("w", encoding="utf-8") as output:
            if server is not None:
                self.process = server.start(command, folder, variables, output.fileno())
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=restore_interrupts,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Standard output and error so far."""
        return self.output_file.read_text(errors="replace", encoding="utf-8")

    def processes(self) -> list[psutil.Process]:
        """All live processes of the run."""
        return [process for process in all_processes() if self._has(process)]

    def running(self, command: str) -> list[psutil.Process]:
        """Live processes of the run with a text in their command line."""
        return [process for process in self.processes() if command in command_line(process)]

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for the end; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Wait until a condition holds; fail if the run ends first."""
        wait_while(lambda: self.process.poll() is None, condition, lambda: self.output, timeout_s)

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the whole process group, like a terminal."""
        os.killpg(self.process.pid, number)

    def remaining(self, timeout_s: float = 60.0) -> list[str]:
        """Kill processes that are still alive after some seconds; return their command lines."""
        deadline = time.monotonic() + timeout_s
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        commands = []
        for process in alive:
            command = command_line(process)[:200]
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                commands.append(command)
        return commands

    def _has(self, process: psutil.Process) -> bool:
        """Whether a process has the mark or, as a fork of a server that runs share, works in the run's folder."""
        try:
            of_run = process.environ().get(MARK) == self.mark or Path(process.cwd()) == self.folder
            return of_run and not has_ended(process)
        except READ_ERRORS:
            return False

    def close(self) -> None:
        """End the run in any state."""
        self.remaining(0)
        self.process.wait()


class RunFiles:
    """Files of a run in ``<working folder>/outputs/<name>``.

    Args:
        folder: working folder of the job.
        name: ``trainer.experiment_name``.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.root = folder / "outputs" / name
        self.newest = max(path.parent for path in self.root.glob("*/config.yaml"))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Rows of ``metrics.jsonl``."""
        return read_jsonl(self.newest / "metrics.jsonl")

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Rows of training steps, by step."""
        return {int(row["step"]): row for row in self.metrics if row["step"] > 0}

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json`` of the run; must equal the copy at the stable path."""
        text = (self.newest / "summary.json").read_text(encoding="utf-8")
        assert (self.root / "summary.json").read_text(encoding="utf-8") == text
        summary: dict[str, Any] = json.loads(text)
        return summary


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def reproducible(row: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step that are equal in two equal runs: all except timings."""
    timings: tuple[str, ...]
    timings = ("timing_", "perf/", "weight_sync/seconds", "weight_sync/gb_per_s", "weight_sync/verify_s", "checkpoint/")
    timings += ("weight_sync/pause_s", "rollout_service/switch_s", "filter_groups/surplus")
    timings += ("rollout/idle_while_waiting_s", "rollout/replica_utilization/")
    timings += ("fully_async/trainer/", "fully_async/rollouter/")
    return {name: value for name, value in row.items() if not name.startswith(timings)}


def assert_finite(row: Mapping[str, float]) -> None:
    assert all(math.isfinite(value) for value in row.values()), row


def assert_says_how_it_ended(output: str, files: RunFiles) -> None:
    """Check a run whose driver or Ray was killed in training: one sentence, its last checkpoint, a summary.

    Args:
        output: on the console.
        files: of the run, which has saved a checkpoint.
    """
    reason = files.summary["stopped"]
    assert reason in (RAY_LOST, KILLED) and output.count(f" ({reason}), not saved") == 1, output
    assert "Traceback (most recent call last)" not in output, output
    checkpoint = re.search(
        rf"To go on from {re.escape(str(files.root))}/checkpoints/global_step_[1-9]\d*:\n  .", output
    )
    assert checkpoint, output
