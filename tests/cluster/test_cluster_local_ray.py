"""A local Ray has only the processes that a run needs."""

from __future__ import annotations

import base64
import json
import logging
import os
import runpy
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import ray_constants

from megarl.base.processes import command_line, descendants
from megarl.cluster import local_ray, ray_programs
from megarl.cluster.local_ray import light_programs, start_local_ray
from megarl.cluster.ray_internals import dashboard_error
from megarl.cluster.reaper import ClusterToken
from megarl.cluster.session import RaySession
from megarl.config.schema.run import TrainerConfig
from megarl.ops.launch.settings import ClusterSettings, JobToRun, Ports, ray_start


def test_local_ray_is_lean_and_leaves_ray_and_the_environment_as_they_were():
    before, variables = (sys.executable, ray_constants.ENABLE_RAY_CLUSTER), dict(os.environ)
    with RaySession(num_cpus=1):
        commands = list(map(command_line, descendants()))
        (gcs,) = [command for command in commands if "gcs_server" in command]
        ray_settings = json.loads(base64.b64decode(gcs.partition("--config_list=")[2].split()[0]))
        # Ray calls a process dead that is silent for this time and 120 seconds, by default 300.
        assert ray_settings["grpc_client_keepalive_time_ms"] > 1000 * TrainerConfig(experiment_name="x").nccl_timeout
        for absent in ("dashboard/dashboard.py", "DashboardAgent", "RuntimeEnvAgent", "monitor.py", "log_monitor.py"):
            assert not any(absent in command for command in commands), absent
        assert ray.util.get_node_ip_address() == "127.0.0.1"
        session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
        assert stat.S_IMODE(session.stat().st_mode) == 0o700, "other users read Ray's logs and replace its sockets"
        assert (sys.executable, ray_constants.ENABLE_RAY_CLUSTER) == before
        changed = {name for name in os.environ if os.environ[name] != variables.get(name)}
        assert not {name for name in changed if name.startswith("MEGARL") or "WINDOWS" in name}
    assert not session.exists(), "the session folder is deleted with the session"


AGENT = """
import sys
print("Ray's own", sys.argv[1:])
"""


@pytest.mark.parametrize("program", [ray_programs.DASHBOARD_AGENT, ray_programs.RUNTIME_ENV_AGENT])
def test_agents_of_a_ray_that_gives_them_ports_are_its_own(program, tmp_path):
    """Such a Ray is older: it waits for no files with the ports."""
    agent = tmp_path / program
    agent.parent.mkdir(parents=True)
    agent.write_text(AGENT, encoding="utf-8")
    ports = ["--grpc-port=40123", "--runtime-env-agent-port=40123"]
    words = ["--node-ip-address=127.0.0.1", "--session-dir=/s", "--node-id=ab", *ports]
    with light_programs(tmp_path, ["dashboard"]):
        command = [sys.executable, "-u", str(agent), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"Ray's own {words}\n" and not done.stderr
    assert sys.executable not in command


def test_error_of_a_task_whose_result_is_not_read_is_logged_and_not_printed(capfd, caplog, monkeypatch):
    """A signal in a weight sync leaves such calls; Ray by itself prints their tracebacks."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # handlers of earlier tests may have closed streams
    caplog.set_level("INFO", "megarl.cluster.ray_internals")
    with RaySession(num_cpus=1):
        fail = ray.remote(num_cpus=0)(lambda: 1 / 0)
        deadline = time.monotonic() + 60
        while "ZeroDivisionError" not in caplog.text and time.monotonic() < deadline:
            unread = fail.remote()
            time.sleep(0.1)
            del unread  # Ray reports the error of a task that has ended by then
    assert "ZeroDivisionError" in caplog.text and "Traceback" not in "".join(capfd.readouterr())


def test_dashboard_is_started_by_request_only(monkeypatch, tmp_path):
    """Its packages are an extra of Ray, so the start of Ray itself is recorded here."""
    started: list[tuple[object, str]] = []

    def init(**options):
        started.append((options["include_dashboard"], Path(sys.executable).read_text(encoding="utf-8")))
        return SimpleNamespace(dashboard_url="127.0.0.1:8265", address_info={"session_dir": tmp_path})

    monkeypatch.setattr(ray, "init", init)
    token = ClusterToken(str(tmp_path))
    assert start_local_ray(1, 2**27, "/t", dashboard=True, token=token) == "http://127.0.0.1:8265"
    assert start_local_ray(1, 2**27, "/t", token=token) == ""
    token.close()
    assert [(included, ",dashboard" in script) for included, script in started] == [(True, False), (False, True)]
    assert dashboard_error() == "" or "No module named" in dashboard_error()


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
    local_ray.main()
    assert [ray_programs.__file__ in script for script in scripts] == [forks]
    assert sys.executable == python
