"""Faults of a running job, and damage to the files of one that has ended."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
from support.cli_runs import CliRun

from megarl.base.checkpoint_files import POINTER
from megarl.base.processes import READ_ERRORS
from megarl.trainer.state.checkpoint_store import CheckpointStore

WORKER = "WorkerProcess"  # and ServingWorkerProcess
UNFINISHED = ".global_step_*.tmp-*"
"""Folder of a checkpoint that is being written."""


class Fault(NamedTuple):
    """A fault that strikes a running job.

    Attributes:
        name: for the table of results.
        strike: injects the fault; returns whether it had a victim.
        codes: correct exit codes; 0 is correct for every fault, since the run may have finished.
        during_save: strike while a checkpoint is being written.
        in_training: strike between two steps only.
        goes_on: the run goes on, so another fault may strike it.
        says_end: a run that it ends within training says so, with its last checkpoint, and has a summary.
    """

    name: str
    strike: Callable[[CliRun, Random], bool]
    codes: frozenset[int]
    during_save: bool = False
    in_training: bool = False
    goes_on: bool = False
    says_end: bool = False


class Damage(NamedTuple):
    """A change to the files of a job that has ended; the next run resumes in spite of it.

    Attributes:
        name: for the table of results.
        apply: changes files below the checkpoint root.
        complete: the number of complete checkpoints that must exist before.
    """

    name: str
    apply: Callable[[Path, Random], None]
    complete: int = 1


def _signal_driver(number: signal.Signals, times: int = 1) -> Callable[[CliRun, Random], bool]:
    def strike(run: CliRun, random: Random) -> bool:
        for index in range(times):
            time.sleep(random.uniform(0.0, 0.5) if index else 0.0)
            run.process.send_signal(number)
        return True

    return strike


def _signal_in_final_save(run: CliRun, random: Random) -> bool:
    """Send SIGTERM, and a second one while the checkpoint that follows is being written."""
    root, pattern = run.folder / "outputs", f"*/checkpoints/{UNFINISHED}"
    before = set(root.glob(pattern))  # of a run that was killed
    run.process.send_signal(signal.SIGTERM)
    while not set(root.glob(pattern)) - before:
        if run.process.poll() is not None:
            return False
        time.sleep(0.002)
    run.process.send_signal(signal.SIGTERM)
    return True


def _fill_disk(run: CliRun, random: Random) -> bool:
    """Fill the file system of the run's folder for some seconds, if the campaign could mount one for it."""
    if not os.path.ismount(run.folder):
        return False
    ballast = run.folder / "ballast"
    deadline = time.monotonic() + random.uniform(1.0, 4.0)
    with ballast.open("wb", buffering=0) as file:
        while time.monotonic() < deadline and run.process.poll() is None:
            try:
                file.write(bytes(1 << 20))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                time.sleep(0.01)  # then takes what the run has freed meanwhile
    ballast.unlink()
    return True


def _signal_group(number: signal.Signals) -> Callable[[CliRun, Random], bool]:
    """Signal every process of the run, as a terminal, a batch scheduler or the kernel's memory killer does."""

    def strike(run: CliRun, random: Random) -> bool:
        for process in run.processes():
            with contextlib.suppress(*READ_ERRORS):
                process.send_signal(number)
        return True

    return strike


def _kill(command: str) -> Callable[[CliRun, Random], bool]:
    """Kill one process of the run with a text in its command line."""
    return lambda run, random: _strike_one(run.running(command), random, psutil.Process.kill)


def _freeze(run: CliRun, random: Random) -> bool:
    return _strike_one(run.running(WORKER), random, psutil.Process.suspend)


def _strike_one(processes: Sequence[psutil.Process], random: Random, act: Callable[[psutil.Process], None]) -> bool:
    try:
        act(random.choice(processes))
    except READ_ERRORS:
        return False
    return True


def _stutter(run: CliRun, random: Random) -> bool:
    """Stop all processes for up to two seconds, as a suspended virtual machine does."""
    processes = run.processes()
    for process in processes:
        with contextlib.suppress(*READ_ERRORS):
            process.suspend()
    time.sleep(random.uniform(0.5, 2.0))
    for process in reversed(processes):
        with contextlib.suppress(*READ_ERRORS):
            process.resume()
    return True


def _second_run(run: CliRun, random: Random) -> bool:
    """Start the same command in the same folder; it must be rejected and name the holder."""
    if run.process.poll() is not None:
        return False
    other = CliRun(run.folder, run.arguments)
    try:
        code, output = other.wait(), other.output
    finally:
        other.process.kill()
    if run.process.poll() is not None:
        return False  # the first run ended before the second one looked
    assert code == 2, f"a second run in the same folder ended with {code}:\n{output}"
    assert str(run.process.pid) in output, output
    return True


NO_REAPER, NO_FORK_SERVER = "SIGKILL of the reaper", "SIGKILL of the fork server"
KILLED, DIED, SURVIVES = frozenset({-9}), frozenset({0, 1}), frozenset({0})
FAULTS: Sequence[Fault] = (
    Fault("SIGKILL of the driver", _signal_driver(signal.SIGKILL), KILLED, says_end=True),
    Fault("SIGKILL of the driver in a save", _signal_driver(signal.SIGKILL), KILLED, during_save=True, says_end=True),
    Fault("SIGKILL of all processes", _signal_group(signal.SIGKILL), KILLED),
    Fault("SIGKILL of all processes in a save", _signal_group(signal.SIGKILL), KILLED, during_save=True),
    Fault("SIGKILL of a worker", _kill(WORKER), DIED),  # 0: a replica or agent runner, which is replaced
    Fault("SIGKILL of a worker in a save", _kill(WORKER), DIED, during_save=True),
    Fault("SIGKILL of the raylet", _kill("raylet/raylet"), DIED, says_end=True),
    Fault("SIGKILL of the GCS", _kill("gcs_server"), DIED, says_end=True),
    Fault("freeze of a worker", _freeze, DIED),
    Fault("pause of all processes", _stutter, SURVIVES, goes_on=True),
    Fault("SIGTERM", _signal_driver(signal.SIGTERM), frozenset({143})),
    Fault("two SIGTERM", _signal_driver(signal.SIGTERM, 2), frozenset({143})),
    Fault("SIGHUP", _signal_driver(signal.SIGHUP), frozenset({129})),
    Fault("Ctrl-C", _signal_driver(signal.SIGINT), frozenset({130})),
    Fault("two Ctrl-C", _signal_driver(signal.SIGINT, 2), frozenset({130})),
    Fault("a second SIGTERM in the final save", _signal_in_final_save, frozenset({143}), in_training=True),
    Fault("a second run in the folder", _second_run, SURVIVES, goes_on=True),
    # 1: the last checkpoint or the export could not be written.
    Fault("full disk under the run folder", _fill_disk, DIED, in_training=True, goes_on=True),
    Fault(NO_REAPER, _kill("megarl.cluster.reaper"), SURVIVES, goes_on=True),
    Fault(NO_FORK_SERVER, _kill("megarl.cluster.fork_server"), DIED),  # its forks end with it
)


def _newest(root: Path) -> Path:
    return root / f"global_step_{max(CheckpointStore(root).steps())}"


def _some_file(root: Path, random: Random) -> Path:
    files = sorted(path for path in _newest(root).rglob("*") if path.is_file() and path.stat().st_size)
    return random.choice(files)


def _flip_bit(root: Path, random: Random) -> None:
    path = _some_file(root, random)
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def _truncate(root: Path, random: Random) -> None:
    path = _some_file(root, random)
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def _foreign_files(root: Path, random: Random) -> None:
    for name in (".nfs000000000000000100000001", ".DS_Store"):
        (_newest(root) / name).write_bytes(random.randbytes(16))


DAMAGES: Sequence[Damage] = (
    Damage("bit flipped in the newest checkpoint", _flip_bit, complete=2),
    Damage("file of the newest checkpoint truncated", _truncate, complete=2),
    Damage("file of the newest checkpoint removed", lambda root, random: _some_file(root, random).unlink(), complete=2),
    Damage("foreign files in the newest checkpoint", _foreign_files),
    Damage("pointer empty", lambda root, random: (root / POINTER).write_text("", encoding="utf-8") and None),
    Damage("pointer removed", lambda root, random: (root / POINTER).unlink()),
    Damage(
        "pointer to a missing step",
        lambda root, random: (root / POINTER).write_text("999\n", encoding="utf-8") and None,
    ),
)
