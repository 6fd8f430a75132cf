"""Ray's command line on a node that the launcher starts."""

import runpy
import sys
from pathlib import Path

import pytest

from megarl.cluster import ray_command, ray_programs
from megarl.ops.launch.settings import ClusterSettings, JobToRun, Ports, ray_start


def start(device):
    job = JobToRun(("x",), False, "x", 1, device, 2)
    return ray_start(ClusterSettings(("a",), "p"), job, "a", "", "", Ports(), "/t")


@pytest.mark.parametrize(
    ("device", "server", "forks"),
    [
        ("cpu", "socket", True),
        ("cuda", "socket", False),  # a fork must not inherit the state of CUDA
        ("cpu", None, False),
        ("cpu", "0", False),
        ("cpu", "1", False),
    ],
)
def test_workers_on_cpus_are_forks_if_a_server_is_named(device, server, forks, monkeypatch, tmp_path):
    scripts, python = [], sys.executable

    def run_module(*_, **__):
        scripts.append("" if sys.executable == python else Path(sys.executable).read_text(encoding="utf-8"))

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", start(device))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.delenv(ray_programs.ADDRESS, raising=False)
    if server is not None:
        monkeypatch.setenv(ray_programs.ADDRESS, str(tmp_path / server) if server == "socket" else server)
    ray_command.main()
    assert [ray_programs.__file__ in script for script in scripts] == [forks]
    assert sys.executable == python
