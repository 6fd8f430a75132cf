"""Stand-ins for the commands that lead to other machines, and the launcher as a process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.launch.settings import PORTS_PER_NODE
from megarl.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class StandIns:
    """A folder with the commands, and the calls that were made of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder / "bin", folder / "calls.jsonl"
        self.folder.mkdir()
        for name in ("ssh", "srun", "sbatch", "scontrol", "kubectl"):
            shutil.copy(HERE / "stand_in.py", self.folder / name)

    def environment(self) -> dict[str, str]:
        path = f"{self.folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "STAND_IN_CALLS": str(self.calls_file)}

    def calls(self, name: str) -> list[dict]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [call for call in map(json.loads, lines) if call["name"] == name]


@pytest.fixture
def stand_ins(tmp_path):
    return StandIns(tmp_path)


@pytest.fixture
def first_port() -> int:
    """The first of a row of ports that nobody uses, as many as a launch of two nodes on one machine takes."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + 2 * PORTS_PER_NODE):
                held.enter_context(socket.socket()).bind(("", port))
            return first


@pytest.fixture
def start_launcher(tmp_path, stand_ins):
    """Starts ``megarl launch`` in a folder of its own; whatever is left of it at the end fails the test."""
    started = []

    def start(*arguments: str, **environment: str) -> Launched:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **stand_ins.environment(), **environment}
        launched = Launched([sys.executable, "-m", "megarl.launch", *arguments], env, tmp_path)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.process.terminate()
        launched.process.wait(90)
        left = launched.left()
        for process in left:
            process.kill()
        assert not left


class Launched:
    """A launcher that runs."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.output = folder / "output.txt"
        self.mark = f"{folder}"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(argv, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.output.read_text()

    def until(self, text: str) -> None:
        """Wait until it has said something."""
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            time.sleep(0.1)

    def code(self) -> int:
        """Wait for its end."""
        return self.process.wait(300)

    def left(self) -> list[psutil.Process]:
        """Processes that inherited its environment, so that they are found whoever their parent is by now."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("STAND_IN_CALLS", "").startswith(self.mark)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
