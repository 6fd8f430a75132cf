"""Trains under a seeded sequence of faults, resumes after each, and compares the result with an undisturbed run.

One journey is one training run from its first to its last step, through several faults. All metrics except timings, and
the weights of the exported policy, must equal those of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from chaos_faults import DAMAGES, FAULTS, NO_FORK_SERVER, NO_REAPER, UNFINISHED, Damage, Fault
from safetensors.torch import load_file
from support import arithmetic_task
from support.cli_runs import START_S, CliRun, RunFiles, assert_says_how_it_ended, reproducible
from support.warm_drivers import Drivers

from megarl.base.errors import CheckpointError
from megarl.cluster.fork_server import ENVIRONMENT
from megarl.trainer.state.checkpoint_store import CheckpointStore

NAME = "chaos"
END_S = 90.0
"""Seconds within which a run ends after a fault, including the watchdog's time for a frozen process."""
GONE_S, GONE_WITHOUT_REAPER_S = 30.0, 100.0
"""Seconds within which the processes of an ended run are gone. Without the reaper, Ray's agents take up to 90."""
WATCHDOG_S = 15
PATIENT_WATCHDOG_S = 60
"""For faults without a frozen process: a process of a busy machine may be silent for ten seconds."""
DISK_MB = 64
"""File system of a journey: several times of what it writes."""
OWN_SERVER = {ENVIRONMENT: "1"}
"""Environment of a run that has a fork server of its own."""


class Violation(AssertionError):
    """A run that did not survive a fault as it should."""


@dataclass
class Campaign:
    """Journeys of one job.

    Attributes:
        folder: of all runs.
        arguments: of the job, without the folder.
        steps: training steps.
        random: selects faults and moments.
        faults: faults to choose from.
        damages: damages to choose from.
        share_at_start: share of the faults that strike within ten seconds after the start, at any moment.
        drivers: forks the drivers of the journeys; None: they are processes of their own.
        workers: environment of the workers; a run that loses its fork server has one of its own.
        log: one line per event.
    """

    folder: Path
    arguments: Sequence[str]
    steps: int
    random: Random
    faults: Sequence[Fault] = FAULTS
    damages: Sequence[Damage] = DAMAGES
    share_at_start: float = 0.2
    drivers: Drivers | None = None
    workers: Mapping[str, str] = field(default_factory=lambda: OWN_SERVER)
    log: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    _deck: list[Fault] = field(default_factory=list)

    def undisturbed(self) -> RunFiles:
        """Run the job without faults."""
        run = CliRun(self.folder / "undisturbed", self.arguments, self.workers)
        try:
            self._require(run.wait(_slowness() * START_S) == 0, run, "the undisturbed run failed")
        finally:
            run.close()
        return RunFiles(run.folder, NAME)

    def journey(self, index: int, num_faults: int, expected: RunFiles) -> None:
        """Run the job through faults until it is complete, then compare it with the undisturbed run."""
        folder = self.folder / f"journey_{index}"
        with _file_system_of_its_own(folder):
            for _ in range(num_faults):
                if self._is_complete(folder):
                    break
                self._strike(folder, self._draw())
                self._damage(folder)
            if not self._is_complete(folder):
                run = self._start(folder)
                try:
                    self._require(run.wait(_slowness() * START_S) == 0, run, "the last run of a journey failed")
                    self._require_gone(run)
                finally:
                    run.close()
            self._compare(RunFiles(folder, NAME), expected)
        self._note(f"journey {index}: complete, equal to the undisturbed run")

    def _draw(self) -> list[Fault]:
        """Draw the faults of one run: the last one ends it.

        They are cards of a shuffled deck, so that every kind strikes before one strikes again.
        """
        drawn: list[Fault] = []
        while not drawn or drawn[-1].goes_on:
            if not self._deck:
                self._deck = self.random.sample(self.faults, len(self.faults))
            drawn.append(self._deck.pop())
        return drawn

    def _start(self, folder: Path, faults: Sequence[Fault] = ()) -> CliRun:
        loses_server = any(fault.name == NO_FORK_SERVER for fault in faults)
        return CliRun(folder, self.arguments, OWN_SERVER if loses_server else self.workers, server=self.drivers)

    def _strike(self, folder: Path, faults: Sequence[Fault]) -> None:
        """Start or resume the job, inject faults at random moments, and check how the run ends."""
        names, codes = " + ".join(fault.name for fault in faults), {0}
        run = self._start(folder, faults)
        try:
            for fault in faults:
                moment = self._wait_for_moment(run, fault, at_start=fault is faults[0])
                has_struck = fault.strike(run, self.random)
                begin = time.monotonic()
                self.struck[fault.name] += has_struck
                codes |= fault.codes
                if fault is not faults[-1]:
                    self._note(f"{fault.name:<36} {moment:<18} {'goes on' if has_struck else 'no victim'}")
            code = run.wait(_slowness() * (END_S + (self.steps if 0 in fault.codes else 0) * 10.0))
            end = f"exit {code:>4}  {time.monotonic() - begin:5.1f} s" if has_struck else f"no victim, exit {code}"
            self._note(f"{fault.name:<36} {moment:<18} {end}")
            if code < 0 and code not in codes and not run.output:
                code = 128 - code  # as in a shell: the interpreter had not started megarl yet
            self._require(code in codes, run, f"{names}: exit code {code}")
            self._require("Traceback (most recent call last)" not in run.output, run, f"{names}: a traceback")
            self._require("[state-dump]" not in run.output, run, f"{names}: the log of Ray on the console")
            has_reaper = all(fault.name != NO_REAPER for fault in faults)
            self._require_gone(run, GONE_S if has_reaper else GONE_WITHOUT_REAPER_S)
            in_training = re.search(r"step \d+/", run.output) and _trained(folder) > 0
            if faults[-1].says_end and code in (1, -9) and in_training and has_reaper:
                assert_says_how_it_ended(run.output, RunFiles(folder, NAME))
        except AssertionError as error:
            raise error if isinstance(error, Violation) else Violation(f"{names}: {error}") from error
        finally:
            run.close()

    def _wait_for_moment(self, run: CliRun, fault: Fault, *, at_start: bool) -> str:
        """Wait for a random moment: at the start if allowed, in a step, or in a save; return a description."""
        done = _trained(run.folder)
        if fault.during_save:
            root = _checkpoints(run.folder)
            first = min(self.steps - 1, done + self.random.randrange(3))
            _wait_until(run, lambda: f"step {first + 1}/" in run.output or first == done)
            _wait_until(run, lambda: any(root.glob(UNFINISHED)))
            return f"save after step {first}"
        if self.random.random() < self.share_at_start and at_start and not fault.in_training:
            delay = self.random.uniform(0.5, 10.0)
            time.sleep(delay)
            return f"{delay:.1f} s after start"
        step = min(done + self.random.randrange(1, 3), self.steps - fault.in_training)
        _wait_until(run, lambda: f"step {step}/" in run.output)
        time.sleep(self.random.uniform(0.0, 1.0))
        return f"after step {step}"

    def _damage(self, folder: Path) -> None:
        """Damage the files of an ended run in one of three cases."""
        if self.random.random() > 0.34:
            return
        root = _checkpoints(folder)
        damage = self.random.choice(self.damages)
        if len(_complete(root)) < max(damage.complete, 1):
            return
        damage.apply(root, self.random)
        self.struck[damage.name] += 1
        self._note(f"{damage.name:<36} between two runs")

    def table(self) -> str:
        """Return the number of strikes of each fault."""
        return "\n".join(f"{count:>4}  {fault}" for fault, count in sorted(self.struck.items()))

    def _is_complete(self, folder: Path) -> bool:
        return any(folder.glob("export/run_id"))

    def _compare(self, actual: RunFiles, expected: RunFiles) -> None:
        """Compare metrics and exported weights, bit for bit."""
        rows = {int(row["step"]): comparable(row) for row in actual.metrics}
        expected_rows = {int(row["step"]): comparable(row) for row in expected.metrics}
        if rows.keys() != expected_rows.keys():
            raise Violation(f"steps {sorted(rows)} in metrics.jsonl, expected {sorted(expected_rows)}")
        for step, row in rows.items():
            other = expected_rows[step]
            names = sorted(name for name in row.keys() | other.keys() if row.get(name) != other.get(name))
            if names:
                values = [(name, row.get(name), other.get(name)) for name in names]
                raise Violation(f"step {step} differs from the undisturbed run: {values}")
        weights, other_weights = (load_file(run.folder / "export" / "model.safetensors") for run in (actual, expected))
        unequal = [name for name in other_weights if not torch.equal(weights[name], other_weights[name])]
        if unequal:
            raise Violation(f"weights differ from the undisturbed run: {unequal}")

    def _require_gone(self, run: CliRun, limit_s: float = GONE_S) -> None:
        limit_s *= _slowness()
        alive = run.remaining(limit_s)
        self._require(not alive, run, f"processes remain after {limit_s:g} s: {alive}")

    def _require(self, holds: bool, run: CliRun, problem: str) -> None:
        if not holds:
            raise Violation(f"{problem}\n--- {run.output_file}\n{run.output}")

    def _note(self, line: str) -> None:
        self.log.append(line)
        print(line, flush=True)


@contextlib.contextmanager
def _file_system_of_its_own(folder: Path) -> Iterator[None]:
    """Mount a small file system at the folder of a journey, if this user may, so that its disk can be full."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _wait_until(run: CliRun, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or the run has ended."""
    run.wait_until(lambda: condition() or run.process.poll() is not None, _slowness() * START_S)


def _slowness() -> float:
    """Factor for limits of time on a machine whose cores other processes use, too; 1 on an idle one."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def comparable(row: dict[str, float]) -> dict[str, float]:
    """Metrics that lost processes and repeated starts must not change."""
    skipped = ("rollout/", "tracking/", "weight_sync/", "run/", "run_files/")
    return {name: value for name, value in reproducible(row).items() if not name.startswith(skipped)}


def _checkpoints(folder: Path) -> Path:
    return folder / "outputs" / NAME / "checkpoints"


def _complete(root: Path) -> list[int]:
    """Steps of the checkpoints that can be resumed from."""
    store, steps = CheckpointStore(root), []
    for step in store.steps():
        try:
            store.verify(root / f"global_step_{step}")
        except CheckpointError:
            continue
        steps.append(step)
    return steps


def _trained(folder: Path) -> int:
    """Return the last saved step."""
    return max(CheckpointStore(_checkpoints(folder)).steps(), default=0)


def make_task(folder: Path) -> list[str]:
    """Create a small task; return the overrides that use it."""
    arithmetic_task.make_task(folder, "--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60")
    return [
        f"data.train_files={folder}/data/train.parquet",
        f"data.val_files={folder}/data/test.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
    ]


def arguments_of(config_name: str, task: Sequence[str], steps: int, watchdog_s: int = WATCHDOG_S) -> list[str]:
    """Return the arguments of a small job that saves after each step."""
    answer_s = watchdog_s * 2 // 3
    return [
        *("--config-name", config_name, *task, f"trainer.experiment_name={NAME}"),
        *(
            "data.train_batch_size=24",
            "actor_rollout_ref.actor.ppo_mini_batch_size=12",
            "actor_rollout_ref.rollout.n=2",
        ),
        *(f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.resume_mode=auto"),
        *("trainer.test_freq=2", "trainer.hf_export_dir=export"),
        *("trainer.max_actor_ckpt_to_keep=3", "trainer.max_critic_ckpt_to_keep=3"),
        *(f"trainer.watchdog.timeout_s={watchdog_s}", "trainer.watchdog.action=end"),
        "+trainer.watchdog.phases.start_workers=60",
        # See docs/how_to/debugging.md#time-limits: a frozen replica is replaced, a frozen actor ends the run.
        *(
            f"actor_rollout_ref.rollout.health.timeout_s={answer_s}",
            f"sync.timeout_s={answer_s}",
            f"trainer.nccl_timeout={watchdog_s + 60}",
        ),
    ]
