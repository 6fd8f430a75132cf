"""Fake commands (ssh, srun, sbatch, scontrol), and the launcher as a process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import warm_drivers
from support.waits import wait_for_text
from support.warm_drivers import Drivers

from megarl.base.processes import READ_ERRORS, all_processes, has_ended
from megarl.ops.launch.settings import PORTS_PER_NODE

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class FakeCommands:
    """Folder with the fake commands, and a log of their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder / "bin", folder / "calls.jsonl"
        self.folder.mkdir()
        for name in ("ssh", "srun", "sbatch", "scontrol"):
            shutil.copy(HERE / "fake_command.py", self.folder / name)

    def environment(self) -> dict[str, str]:
        path = f"{self.folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "FAKE_CALLS": str(self.calls_file)}

    def calls(self, name: str) -> list[dict]:
        lines = self.calls_file.read_text(encoding="utf-8").splitlines() if self.calls_file.exists() else []
        return [call for call in map(json.loads, lines) if call["name"] == name]


@pytest.fixture
def fake_commands(tmp_path):
    return FakeCommands(tmp_path)


@pytest.fixture
def first_port() -> int:
    """First of a range of free ports, large enough for two nodes on one machine.

    Other tests' ports, Ray's workers' and outgoing connections' are above, and each test process has a range of its
    own, so that the ports stay free until the launcher binds them.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        first = 2000 + 500 * (process % 16) + random.randrange(500 - 2 * PORTS_PER_NODE)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + 2 * PORTS_PER_NODE):
                held.enter_context(socket.socket()).bind(("", port))
            return first


_WARM = """#!/usr/bin/env bash
# Python on the nodes, whose drivers of jobs are forks of a server of tests/support/warm_drivers.py.
if [ "$1 $2" = "-m megarl.cli" ]; then exec {client} "${{@:2}}"; fi
exec {python} "$@"
"""


@pytest.fixture(scope="session")
def warm_script(drivers: Drivers) -> list[str]:
    """Command that runs the script after it in a fork."""
    return [sys.executable, "-S", warm_drivers.__file__, drivers.address]


@pytest.fixture
def warm_python(warm_script, tmp_path) -> Path:
    """Interpreter for ``--python``."""
    path = tmp_path / "python"
    path.write_text(_WARM.format(client=shlex.join(warm_script), python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def start_launcher(tmp_path, fake_commands):
    """Start ``megarl launch`` in a temporary folder; surviving processes fail the test."""
    started = []

    def start(*arguments: str, **environment: str) -> Launched:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **fake_commands.environment(),
            **environment,
        }
        launched = Launched([sys.executable, "-m", "megarl.ops.launch", *arguments], env, tmp_path)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.process.terminate()
        launched.process.wait(180)
        survivors = launched.survivors()
        for process in survivors:
            process.kill()
        assert not survivors


class Launched:
    """A running launcher."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.output = folder / "output.txt"
        self.mark = f"{folder}"
        with self.output.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(argv, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until the output contains a match of a regular expression, and return it."""
        return wait_for_text(lambda: self.process.poll() is None, pattern, self.text, 600)

    def code(self) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(300)

    def survivors(self) -> list[psutil.Process]:
        """Return surviving processes, found by their environment, whatever their parent is."""
        return [process for process in all_processes() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether it has the mark or, as a fork of a server that tests share, works in the launcher's folder."""
        try:
            marked = process.environ().get("FAKE_CALLS", "").startswith(self.mark)
            ours = marked or Path(process.cwd()).is_relative_to(self.mark)
            return ours and process.pid != os.getpid() and not has_ended(process)
        except READ_ERRORS:
            return False
