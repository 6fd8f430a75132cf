"""Fork server: workers of a local CPU run are forked from one process that has imported their modules."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.expected_errors import raises

from megarl.base.processes import wait_for_ends
from megarl.cluster import fork_server as fork_server_module
from megarl.cluster import ray_programs
from megarl.cluster.fork_server import ENVIRONMENT, ForkServer, fork_address, fork_server
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.models import ParallelLayout

SCRIPT = """
import json, os, sys
import colorsys
values = {"argv": sys.argv[1:], "cwd": os.getcwd(), "value": os.environ["VALUE"], "parent": os.getppid(),
          "loaded": "imaginary_module" in sys.modules, "path": sys.path[:2], "home": "HOME" in os.environ}
print(json.dumps(values), flush=True)
print("to standard error", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "imaginary_module.py").write_text("", encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    try:
        running = ForkServer(["imaginary_module"])
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    yield running
    running.close()


def worker(folder, code):
    """Write a script with the name of Ray's script for workers."""
    folder.mkdir(exist_ok=True)
    path = folder / "default_worker.py"
    path.write_text(code, encoding="utf-8")
    return path


def run_client(address, script, *arguments, env):
    """Run the client as Ray does, and read until its standard streams are closed by the fork."""
    command = [sys.executable, "-I", "-S", ray_programs.__file__, "", str(script), *arguments]
    variables = {**env, ray_programs.ADDRESS: address}
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=script.parent, timeout=300)


def test_fork_has_the_clients_arguments_environment_folder_and_streams(server, tmp_path):

    script = worker(tmp_path, SCRIPT)
    env = {"VALUE": "of the client", "PYTHONPATH": "/modules/of/the/client"}
    done = run_client(server.address, script, "--rank", "3", env=env)
    values = json.loads(done.stdout)
    assert values["argv"] == ["--rank", "3"]
    assert values["cwd"] == str(tmp_path) and values["path"] == [str(tmp_path), "/modules/of/the/client"]
    assert values["value"] == "of the client" and not values["home"], "the environment of the client, nothing else"
    assert values["loaded"], "a fork finds the modules of the server loaded"
    assert values["parent"] == server._process.pid
    assert done.stderr == "to standard error\n"


def test_exception_in_a_fork_leaves_the_server_running(server, tmp_path):
    failing = worker(tmp_path / "failing", "raise ValueError('of the script')")
    fine = worker(tmp_path / "fine", "print('fine')")
    assert "of the script" in run_client(server.address, failing, env={}).stderr
    assert run_client(server.address, fine, env={}).stdout == "fine\n"


def test_client_that_is_killed_leaves_the_server_running(server, tmp_path):
    for message in (b"", (10**6).to_bytes(ray_programs.HEADER_BYTES, "big"), b"x"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(server.address)
            socket.send_fds(connection, [message], [0, 1, 2]) if message else None
    script = worker(tmp_path, "print('fine')")
    assert run_client(server.address, script, env={}).stdout == "fine\n"


def message(body, size=None):
    return (len(body) if size is None else size).to_bytes(ray_programs.HEADER_BYTES, "big") + body


REQUEST = {"argv": ["worker.py"], "env": {}, "cwd": "/"}
MALFORMED = [
    b"no JSON",
    b"[" * 100_000,
    b"5",
    b"null",
    b"[]",
    b"{}",
    b"\xff",
    *(json.dumps({**REQUEST, name: value}).encode() for name in REQUEST for value in (None, 5, [5], {"a": 5})),
]


def test_client_with_a_malformed_request_ends_nothing(server, tmp_path):
    no_pid = json.dumps({**REQUEST, "env": {"RAY_RAYLET_PID": "x"}}).encode()
    http = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for text in [*map(message, MALFORMED), message(no_pid), message(b"{}", 2**62), message(b"{}", 0), http]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(server.address)
            socket.send_fds(connection, [text], [0, 1, 2])
            connection.settimeout(300)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b"", text
    script = worker(tmp_path, "print('fine')")
    assert run_client(server.address, script, env={}).stdout == "fine\n"
    assert server._process.poll() is None


def test_server_without_further_processes_goes_on(monkeypatch):
    def refuse():
        raise BlockingIOError("as beyond the limit of processes")

    monkeypatch.setattr(os, "fork", refuse)
    with socket.socket() as inherited:
        assert fork_server_module._is_fork([inherited]) is None
        assert inherited.fileno() >= 0


def test_worker_without_a_server_is_a_new_process(tmp_path):
    script = worker(tmp_path, "import sys; print('new', sys.argv[1:])")
    done = run_client(str(tmp_path / "no-socket"), script, "a b", env={})
    assert done.stdout == "new ['a b']\n" and done.returncode == 0


def test_early_end_of_the_server_is_reported(caplog):
    server = ForkServer(["no_such_module"])
    server._process.wait(300)
    server.close()
    assert "No module named 'no_such_module'" in caplog.text
    assert not server.folder.exists()


def test_forks_end_with_the_server(tmp_path):
    script = worker(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    running = ForkServer([])
    command = [sys.executable, "-I", "-S", ray_programs.__file__, "", str(script)]
    variables = {**os.environ, ray_programs.ADDRESS: running.address}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables) as client:
        assert client.stdout is not None
        fork = psutil.Process(int(client.stdout.readline()))
        running.close()
        assert wait_for_ends([fork], 120) == []


def test_server_ends_with_the_process_that_started_it(tmp_path):
    code = "from megarl.cluster.fork_server import ForkServer; s = ForkServer([]); print(s._process.pid, s.folder)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    pid, folder = done.stdout.split()
    for _ in range(1800):
        if not Path(f"/proc/{pid}").exists():
            assert not Path(folder).exists()
            return
        time.sleep(0.1)
    pytest.fail("the server goes on without its parent")


@pytest.mark.parametrize(("variable", "value"), [(ENVIRONMENT, "0"), ("RAY_ADDRESS", "auto")])
def test_fork_server_is_off_if_disabled_or_ray_runs_elsewhere(monkeypatch, variable, value):
    monkeypatch.setattr(fork_server_module, "_address", None)  # that of the other tests
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setenv(variable, value)
    with fork_server():
        assert fork_address() is None


def test_workers_of_a_local_ray_are_forks(server, monkeypatch):
    monkeypatch.setattr(fork_server_module, "_address", server.address)
    light, layout = "tests.cluster.light_workers.Sleeper", ParallelLayout(dp=2)
    with RaySession(num_cpus=2) as session:
        pool = session.place([ResourcePool("main", "cpu", [2])])["main"]
        forked = WorkerGroup("forked", light, {}, layout, pool)
        assert forked.call("loaded", "imaginary_module") == [True, True]


NODE_SCRIPT = """
import json, os, sys
loaded = [name for name in ("imaginary_module", "ray") if name in sys.modules]
print(json.dumps({"parent": os.getppid(), "loaded": loaded, "job": os.environ["RAY_JOB_ID"]}), flush=True)
if sys.argv[1:]:
    input()
"""


def test_workers_of_a_node_are_forks_of_a_process_that_has_read_their_environment_and_ends_with_the_node(
    server, tmp_path
):
    script = worker(tmp_path, NODE_SCRIPT)
    with subprocess.Popen(["sleep", "600"]) as raylet:
        env = {"HOME": str(tmp_path), "RAY_RAYLET_PID": str(raylet.pid), "PYTHONPATH": os.pathsep.join(sys.path)}
        jobs = [json.loads(run_client(server.address, script, env={**env, "RAY_JOB_ID": job}).stdout) for job in "112"]
        assert all(values["loaded"] == ["imaginary_module", "ray"] for values in jobs)
        assert [values["job"] for values in jobs] == ["1", "1", "2"]
        first, second, third = (values["parent"] for values in jobs)
        assert first == second != third, "Ray reads the job at its import"
        assert {psutil.Process(pid).ppid() for pid in (first, third)} == {server._process.pid}
        processes = [psutil.Process(pid) for pid in (first, third)]

        command = [sys.executable, "-I", "-S", ray_programs.__file__, "", str(script), "wait"]
        variables = {**env, "RAY_JOB_ID": "1", ray_programs.ADDRESS: server.address}
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
        assert client.stdin is not None and client.stdout is not None
        assert json.loads(client.stdout.readline())["parent"] == first
        raylet.kill()
        assert wait_for_ends([processes[1]], 120) == []
        assert processes[0].is_running(), "a worker that goes on keeps its parent"
        client.stdin.close()
        assert wait_for_ends([processes[0]], 120) == []
        client.wait()
    done = run_client(server.address, script, env={**env, "RAY_JOB_ID": "1"})
    assert json.loads(done.stdout)["parent"] == os.getpid(), "without the node there is no fork"


def test_jobs_can_share_a_server(server, monkeypatch):
    monkeypatch.setattr(fork_server_module, "_address", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(ENVIRONMENT, server.address)
    for _ in range(2):
        with fork_server():
            assert fork_address() == server.address
        assert fork_address() is None and server._process.poll() is None


def test_address_without_a_server_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(fork_server_module, "_address", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "socket"))
    with raises("worker.no-fork-server", f"{ENVIRONMENT}={tmp_path / 'socket'}"), fork_server():
        pass
