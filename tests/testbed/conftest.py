"""The launcher on real sshd and SLURM, between three hosts on this machine.

The hosts have networks, process tables and folders of their own. ``CLUSTER=1 bash launch/test.sh`` runs these tests.
They need root.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.arithmetic_task import make_task
from support.waits import wait_for_text

from megarl.tracing.board import BOARD, find_file, read_board

ROOT = Path(__file__).resolve().parents[2]
HOSTS = Path(__file__).with_name("hosts.sh")
LIMIT_S = 600.0  # of one launch, on a busy machine
CLEAN_S = 150.0  # a host that was cut off ends its processes after 95 s
DAEMONS = re.compile(r"hosts\.sh init|/sshd|munged|slurmctld|slurmscriptd|slurmd|slurmstepd: \[|sleep 3600|ps -eo|sftp")

collect_ignore_glob = [] if os.environ.get("CLUSTER") == "1" else ["test_*.py"]


class Bed:
    """Hosts h1, h2, h3; ``hosts.sh`` explains the commands.

    Args:
        state: folder of the hosts' state.
        shared: folders that all hosts see, if they are below /tmp.
    """

    def __init__(self, state: Path, shared: list[Path]) -> None:
        self.state = state
        self.environment = {**os.environ, "BED": str(state), "BED_SHARE": " ".join(map(str, shared))}

    def __call__(self, *command: str) -> str:
        """Run a command of ``hosts.sh`` and return its output."""
        done = subprocess.run(
            ["bash", str(HOSTS), *command], env=self.environment, text=True, capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def on(self, host: str, *command: str) -> str:
        """Run a command on a host and return its output."""
        return self("on", host, *command)

    def start(self, host: str, output: Path, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a command on a host, with its output in a file."""
        with output.open("wb") as file:
            words = ["bash", str(HOSTS), "on", host, *command]
            return subprocess.Popen(words, env=self.environment, stdout=file, stderr=subprocess.STDOUT)

    def watched(self, host: str) -> list[psutil.Process]:
        """Return the processes of a host that show their activity: driver, ranks and engines."""
        first = (self.state / host / "pid").read_text(encoding="ascii").strip()
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        found = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                if os.readlink(f"/proc/{pid}/ns/pid") == namespace and find_file(pid, BOARD) is not None:
                    found.append(psutil.Process(pid))
        return found

    def power_off_during(
        self, phase: str, driver_host: str, host: str, has_begun: Callable[[], bool] = lambda: True, silent: bool = True
    ) -> None:
        """Switch a host off while the driver is in a phase that needs the host.

        The processes of the host are stopped first. If the phase ends all the same, they go on, and the next one is
        tried.

        Args:
            has_begun: whether the part of the phase has begun that the host must not finish.
            silent: cut the cable first, so that no connection is closed.
        """
        # Ray's actors have verbs of the same names.
        drivers = [process for process in self.watched(driver_host) if not process.cmdline()[0].startswith("ray::")]
        processes = self.watched(host)

        def is_open() -> bool:
            return any(phase in open_spans(driver) for driver in drivers)

        deadline = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline, f"{phase} was not seen"
            if not (is_open() and has_begun()):
                time.sleep(0.001)
                continue
            for process in processes:
                process.suspend()
            time.sleep(1)
            if is_open():
                break
            for process in processes:
                process.resume()
        if silent:
            self("cut", host)
        self("off", host)

    def leftovers(self, host: str) -> list[str]:
        """Return the processes of a host beside its daemons, and files of runs in its /tmp and /dev/shm."""
        processes = [line for line in self.on(host, "ps", "-eo", "args=").splitlines() if not DAEMONS.search(line)]
        # The folder of a token that a killed driver leaves is deleted by the next run.
        names = "/tmp/megarl-[!0]* /tmp/megarl-0/[!r]* /tmp/ray* /dev/shm/*"
        files = self.on(host, "sh", "-c", f"ls -d {names} 2>/dev/null || true").splitlines()
        return [line for line in processes if "ls -d /tmp/megarl" not in line] + files


def open_spans(process: psutil.Process) -> list[str]:
    """Return the current activity of a watched process, outermost first; empty if it has ended."""
    board = read_board(process.pid)
    return [] if board is None else [span.name for span in board.spans]


class Launch:
    """A launcher on host h1, or another command there.

    Args:
        command: command line on the host.
        output: file for its output.
    """

    def __init__(self, bed: Bed, command: list[str], output: Path, host: str = "h1") -> None:
        self.output = output
        self.process = bed.start(host, output, command)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches a regular expression, and return the match."""
        return wait_for_text(lambda: self.process.poll() is None, pattern, self.text, LIMIT_S)

    def signal(self, number: int) -> None:
        """Send a signal to the launcher itself, inside its host."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        launcher = next(process for process in family if process.cmdline()[:1] == [sys.executable])
        launcher.send_signal(number)

    def code(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(LIMIT_S)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts see at the same path."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "megarl").symlink_to(ROOT / "megarl")  # this checkout, whichever the environment has installed
    return folder


@pytest.fixture(scope="session")
def bed(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """The hosts; they keep their state between tests."""
    bed = Bed(tmp_path_factory.mktemp("bed"), [ROOT, Path(sys.prefix), shared])
    bed("up", "3")
    yield bed
    bed("down")


@pytest.fixture
def hosts(bed: Bed) -> Iterator[Bed]:
    """The hosts; afterwards all are on and connected, and no process or file of a run is left."""
    bed("up", "3")
    yield bed
    bed("up", "3")
    for host in ("h1", "h2", "h3"):
        bed("mend", host)
        bed("slow", host)
        deadline = time.monotonic() + LIMIT_S
        while leftovers := bed.leftovers(host):
            assert time.monotonic() < deadline, (host, leftovers)
            time.sleep(0.5)


@pytest.fixture
def launch(hosts: Bed, shared: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Launch]]:
    """Start ``megarl launch OPTIONS`` on h1."""
    started: list[Launch] = []

    def start(*options: str, host: str = "h1", **environment: str) -> Launch:
        variables = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1", **environment}
        words = ["env", "-C", str(shared), *(f"{name}={value}" for name, value in variables.items())]
        words += [
            sys.executable,
            "-m",
            "megarl.ops.launch",
            "--env",
            "PYTHONPATH",
            "--env",
            "OMP_NUM_THREADS",
            *options,
        ]
        started.append(Launch(hosts, words, shared / f"{request.node.name}-{len(started)}.txt", host))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.signal(signal.SIGKILL)
            launched.process.wait(60)


@pytest.fixture(scope="session")
def task(shared: Path) -> Path:
    """The small quickstart task of the end-to-end tests."""
    options = ("--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60")
    return make_task(shared / "task", *options)


@pytest.fixture
def grpo(task: Path, shared: Path, request: pytest.FixtureRequest) -> list[str]:
    """A small GRPO job over two hosts, with a checkpoint after each step."""
    return [
        *("train", "--config-name", "quickstart_grpo", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"),
        f"actor_rollout_ref.model.path={task}/model",
        f"data.train_files={task}/data/train.parquet",
        "data.val_files=[]",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.hf_export_dir=null"),
        *("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"),
        f"trainer.experiment_name={request.node.name.removeprefix('test_')[:40]}",
        f"trainer.default_local_dir={shared}/{request.node.name}",
    ]


TRIALS: list[tuple[str, str, float]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the verdict of each trial."""
    is_trial = report.nodeid.startswith("tests/testbed/")  # hooks of this file see all tests
    if is_trial and (report.when == "call" or report.failed):
        TRIALS.append((report.nodeid.split("::")[-1], report.outcome, report.duration))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of trials of docs/how_to/launch.md."""
    if TRIALS:
        terminalreporter.write_line("\n| trial | verdict | seconds |\n|---|---|---|")
    for name, outcome, seconds in TRIALS:
        trial = name.removeprefix("test_").replace("_", " ")
        terminalreporter.write_line(f"| {trial} | {outcome} | {seconds:.0f} |")
