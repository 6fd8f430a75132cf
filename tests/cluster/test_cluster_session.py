"""A session leaves no process behind, however it ends. Each test runs a script and looks for its children."""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.exceptions import AuthenticationError
from support import warm_drivers
from support.expected_errors import raises
from support.waits import wait_while
from support.warm_drivers import WarmDriver

from megarl.base.files import private_files, private_folder
from megarl.base.processes import (
    READ_ERRORS,
    all_processes,
    child_processes,
    command_line,
    descendants,
    has_ended,
    wait_for_ends,
)
from megarl.base.signals import signals_ignored
from megarl.cluster import reaper
from megarl.cluster import session as session_module
from megarl.cluster.local_ray import start_local_ray
from megarl.cluster.reaper import ClusterToken, delete_stale_tokens
from megarl.cluster.session import DEFAULT_OBJECT_STORE_BYTES, RaySession, local_store_bytes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal, sys
import ray
from megarl.base.signals import exit_at_once_on_signals
exit_at_once_on_signals()  # as a job does, until its session handles signals
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.models.layout import ParallelLayout

with RaySession(num_cpus=1) as session:
    pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
    group = WorkerGroup("sleeper", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(), pool)
    group.pid()
    if sys.argv[1] == "error":
        group.explode()
    if sys.argv[1] == "with an agent":  # a runtime environment starts it
        ray.get(ray.remote(num_cpus=0, runtime_env={"env_vars": {"A": "B"}})(lambda: None).remote())
        session.last_words("ended in step 3")
    call = group.submit("sleep", 600)
    print("busy", flush=True)
    call.result()
"""


def marked_processes(mark):
    """Living processes whose environment has the mark, which every child inherits."""
    actual = []
    for process in all_processes():
        with contextlib.suppress(*READ_ERRORS):
            if process.environ().get("CLUSTER_TEST_MARK") == mark and not has_ended(process):
                actual.append(process)
    return actual


class Script:
    """Code that runs as a fork of a server which has imported Ray; ``returncode`` and ``pid`` are of its process."""

    def __init__(self, drivers, folder, code, arguments, env):
        name = uuid.uuid4().hex
        file, self.stdout, self.stderr = (folder / f"{name}.{suffix}" for suffix in ("py", "out", "err"))
        file.write_text(code, encoding="utf-8")
        with (
            Path(os.devnull).open(encoding="utf-8") as nothing,
            self.stdout.open("w", encoding="utf-8") as out,
            self.stderr.open("w", encoding="utf-8") as err,
        ):
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            env = {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self.process = WarmDriver(drivers.address, str(file), list(arguments), str(ROOT), env, streams)

    @property
    def output(self):
        return self.stdout.read_text(encoding="utf-8") + self.stderr.read_text(encoding="utf-8")

    def until(self, condition):
        """Wait until a condition holds, which is before the end of the script."""
        wait_while(lambda: self.process.poll() is None, condition, lambda: self.output)

    def until_printed(self, line):
        self.until(lambda: line in self.stdout.read_text(encoding="utf-8").splitlines())


@pytest.fixture
def script(tmp_path, drivers):
    """Start the script; kill its remaining processes afterwards, so that a failure does not affect the next test."""
    mark = uuid.uuid4().hex
    env = {**os.environ, "CLUSTER_TEST_MARK": mark}
    env.pop("RAY_ADDRESS", None)
    started = []

    def start(mode):
        started.append(Script(drivers, tmp_path, SCRIPT, [mode], env))
        return started[-1], mark

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()
    for process in marked_processes(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize(
    ("number", "returncode"),
    [
        (signal.SIGINT, -signal.SIGINT),
        pytest.param(
            *(signal.SIGTERM, 128 + signal.SIGTERM),
            marks=pytest.mark.release(
                twin="tests/cluster/test_cluster_session.py::test_signal_during_a_verb_leaves_no_process"
            ),
        ),
    ],
)
def test_signal_during_a_verb_leaves_no_process(script, number, returncode):
    run, mark = script("busy")
    run.until_printed("busy")
    assert len(marked_processes(mark)) > 3, "the check itself must see Ray's processes"
    run.process.send_signal(number)
    assert run.process.wait(120) == returncode
    assert marked_processes(mark) == []


OTHER_MOMENT = pytest.mark.release(
    twin="tests/cluster/test_cluster_session.py::test_signal_to_the_group_while_ray_starts_ends_soon_and_in_order"
)


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGTERM, "megarl.cluster.reaper", marks=OTHER_MOMENT),
        (signal.SIGINT, "gcs_server"),
        pytest.param(signal.SIGHUP, "raylet/raylet", marks=OTHER_MOMENT),
        (signal.SIGTERM, "default_worker.py"),
    ],
)
def test_signal_to_the_group_while_ray_starts_ends_soon_and_in_order(script, number, moment):
    """The moment is the start of one of the processes."""
    run, mark = script("busy")
    run.until(lambda: any(moment in command_line(process) for process in marked_processes(mark)))
    os.killpg(run.process.pid, number)
    code = run.process.wait(55)  # a driver whose Ray is gone waits for a minute
    # Python ends itself by SIGINT after a KeyboardInterrupt.
    assert code == (-number if number == signal.SIGINT else 128 + number), run.output
    assert "GCS" not in run.output and "SIGTERM received" not in run.output
    assert marked_processes(mark) == []


def test_error_leaves_no_process_and_sets_the_exit_code(script):
    run, mark = script("error")
    assert run.process.wait(120) == 1
    assert "sleeper has no verb 'explode'; it has:" in run.output
    assert marked_processes(mark) == []


def sessions(pid):
    return list((private_folder() / "ray").glob(f"session_*_{pid}"))


def test_killed_driver_leaves_no_process(script):
    run, mark = script("with an agent")
    process = run.process
    run.until_printed("busy")
    started = descendants(psutil.Process(process.pid))
    assert any("RuntimeEnvAgent" in command_line(child) for child in started), "agents overwrite their environment"
    before = sessions(process.pid)  # with those of an earlier process with this ID
    (own,) = [folder for folder in before if str(folder) in "\n".join(map(command_line, started))]
    process.kill()
    process.wait(60)
    alive = wait_for_ends(started, 30)  # without the reaper, Ray's agents live for up to a minute
    assert alive == [] and marked_processes(mark) == []
    assert run.output.count("ended in step 3") == 1, run.output
    before.remove(own)
    assert sessions(process.pid) == before, "only its own session folder is deleted"


def test_files_of_a_killed_driver_are_deleted_at_the_next_start(tmp_path, monkeypatch):
    """If its reaper was killed as well, nothing else deletes the token and Ray's session folder."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(
        reaper, "private_folder", lambda: tmp_path / "tmp"
    )  # where no other run finds the token as well
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        token = ClusterToken(str(tmp_path))
        (tmp_path / f"session_today_{os.getpid()}" / "logs").mkdir(parents=True)
        os.write(write, str(token.file).encode())
        signal.pause()
    token_file, session = Path(os.read(read, 1000).decode()), tmp_path / f"session_today_{pid}"
    foreign = tmp_path / "session_today_1"
    foreign.mkdir()
    try:
        delete_stale_tokens()
        assert token_file.is_file() and session.is_dir(), "its driver lives"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (tmp_path / "tmp" / "ray-token-fifo").mkdir()
    os.mkfifo(tmp_path / "tmp" / "ray-token-fifo" / "owner")  # nobody writes to it: opening it must not wait
    delete_stale_tokens()
    assert not token_file.parent.exists() and not session.exists() and foreign.is_dir()


@pytest.mark.parametrize("everything", [True, False])
def test_copied_logs_of_ray_are_private_and_without_empty_folders(tmp_path, everything):
    logs = tmp_path / "session_today_1" / "logs"
    (logs / "nsight").mkdir(parents=True)
    (logs / "nsight").chmod(0o777)  # as Ray makes it
    (logs / "raylet.out").write_text("line", encoding="utf-8")
    (logs / "raylet.out").chmod(0o644)
    target = tmp_path / "run" / "logs" / "ray"
    with private_files():
        session_module._copy_logs([logs.parent], target, everything)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in target.rglob("*")}
    assert modes == ({"session_today_1": 0o700, "raylet.out": 0o600} if everything else {})


LOSS = """
import signal, sys, time
from megarl.base.errors import RayLost
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.models.layout import ParallelLayout

daemon, moment = sys.argv[1:]
try:
    with RaySession(num_cpus=1) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
        group = WorkerGroup("sleeper", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(), pool)
        group.pid()
        if moment == "at the end":
            session.finish()
        [victim] = [process for process in session._daemons if process.name() == daemon]
        victim.kill()
        signal.alarm(50)  # Ray's abort comes after a minute
        while session.lost() is None:
            time.sleep(0.05)
        if moment == "in a call":
            group.sleep(600)
        time.sleep(1.0)  # longer than the watch takes
except RayLost as error:
    sys.exit(str(error))
"""


OTHER_DEATH = pytest.mark.release(
    twin="tests/cluster/test_cluster_session.py::"
    "test_death_of_a_process_of_ray_is_one_sentence_and_no_failure_of_finished_work"
)
RAYLET_DIED = "Ray's node process (raylet) died, so the run ends [ray.process-died]"


@pytest.mark.parametrize(
    ("daemon", "moment", "code", "message"),
    [
        ("gcs_server", "in a call", 1, "Ray's control process (GCS) died, so the run ends [ray.process-died]"),
        pytest.param("raylet", "in a call", 1, RAYLET_DIED, marks=OTHER_DEATH),  # the next test has it, too
        pytest.param(
            *("gcs_server", "at the end", 0, "(GCS) died when the work was complete; nothing is lost"),
            marks=OTHER_DEATH,
        ),
        ("raylet", "at the end", 0, "(raylet) died when the work was complete; nothing is lost"),
    ],
)
def test_death_of_a_process_of_ray_is_one_sentence_and_no_failure_of_finished_work(
    drivers, tmp_path, daemon, moment, code, message
):
    """Ray by itself aborts the driver a minute after the GCS, and prints the whole log of the raylet.

    The script limits the time from the loss to its end, by an alarm; before it, Ray starts, slowly under load.
    """
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = Script(drivers, tmp_path, LOSS, [daemon, moment], env)
    assert run.process.wait(180) == code, run.output
    assert message in run.output and len(run.output.splitlines()) == 1 and not run.stdout.read_text(encoding="utf-8"), (
        run.output
    )


ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
"""


def test_a_driver_without_a_parent_outlives_its_raylet():
    """Ray takes process 1, the parent of such a driver, for a raylet that has died, and ends it without a word."""
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_RAYLET_PID")}
    command = [sys.executable, "-c", ORPHAN, LOSS, "raylet", "in a call"]
    done = subprocess.run(  # returns when the orphan, too, has closed its output
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180
    )
    assert done.stdout == f"{RAYLET_DIED}\n"


def join(drivers, gcs_address, *arguments, **authentication):
    """Join the local cluster from another process, with the authentication of a user's shell."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")},
        "RAY_ADDRESS": gcs_address,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # this cluster is on the loopback interface only
        **authentication,
    }
    client = [sys.executable, "-S", warm_drivers.__file__, drivers.address]
    command = [*client, "tests.cluster.joining_driver", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_other_processes_join_a_local_cluster_with_its_token_only_and_leave_it_as_it_was(
    drivers, monkeypatch, tmp_path
):
    """Ray itself would follow the shell, which turns authentication off here, and would share one token with others.

    Below a long folder for temporary files, the addresses of Ray's sockets would be too long.
    """
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    with RaySession(num_cpus=1) as session:
        address, token = ray.get_runtime_context().gcs_address, Path(session.token_file)
        assert session.spills(DEFAULT_OBJECT_STORE_BYTES) is None
        assert re.match(r"a step may keep 8\.0 GiB of .*which has 0\.2 GiB.*/dev/shm", session.spills(8 * 2**30) or "")
        assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        assert private_folder() in token.parents, "and Ray's files are in the folder of this user"
        assert private_folder() in Path(ray._private.worker._global_node.get_session_dir_path()).parents
        assert os.environ["RAY_AUTH_MODE"] == "disabled" and os.environ["RAY_AUTH_TOKEN"] == "of another cluster"
        # A refused client tries again every second.
        summary = tmp_path / "summary"
        stranger = join(drivers, address, str(summary), RAY_AUTH_MODE="disabled", RAY_NUM_REDIS_GET_RETRIES="2")
        assert stranger.returncode == 1 and "refused: cannot join the Ray cluster" in stranger.stderr, stranger.stderr
        assert "RAY_AUTH_MODE is 'disabled' here: set RAY_AUTH_MODE=token" in stranger.stderr
        for arguments, code in (((), 0), (("killed",), -signal.SIGKILL)):  # and a joined cluster survives its driver
            guest = join(
                drivers, address, str(summary), *arguments, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)
            )
            assert guest.returncode == code, guest.stderr
            assert ("ended in step 3" in guest.stderr) == summary.is_file() == bool(code), "a killed driver only"
            pid = int(guest.stdout.split("pid")[1])
            deadline = time.monotonic() + 90
            while (psutil.pid_exists(pid) or ray.available_resources().get("CPU") != 1) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert not psutil.pid_exists(pid)
            assert ray.available_resources()["CPU"] == 1, "the guest's device is free again"
    assert not token.parent.exists()
    assert get_authentication_mode() == AuthenticationMode.DISABLED, "the user's setting holds again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_during_the_shutdown_does_not_interrupt_it(number):
    def interrupt(*_):
        raise SystemExit(128 + number)

    previous = signal.signal(number, interrupt)
    try:
        with signals_ignored():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, previous)


def test_the_object_store_of_a_started_ray_holds_a_step_within_the_limits_of_the_machine(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100 * 2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20 * 2**30))
    assert local_store_bytes(0) == local_store_bytes(2**20) == DEFAULT_OBJECT_STORE_BYTES
    assert local_store_bytes(2**30) == 2**30
    assert local_store_bytes(2**50) == 18 * 2**30, "a tenth of the shared memory is left"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**50))
    assert local_store_bytes(2**50) == 30 * 2**30


def test_invalid_settings_raise():
    with raises("ray.num-cpus", "num_cpus=0"):
        RaySession(num_cpus=0)
    with raises("ray.object-store-size", "object_store_bytes=1000"):
        RaySession(object_store_bytes=1000)


def test_address_without_a_cluster_raises():
    with (
        raises("ray.no-cluster", "not an address", "host:port"),
        RaySession(address="not an address"),
    ):
        pass


def test_failed_start_of_ray_is_repeated_once(monkeypatch, tmp_path):
    """The first start fails behind Ray's processes, as its time limit does; they end before the second start.

    A child that another thread starts meanwhile is not of Ray and lives on.
    """
    attempts, left, bystanders = [], [], []

    def start(**options):
        attempts.append(options)
        if len(attempts) > 1:
            left.extend(child for child in child_processes() if child.pid == attempts[0]["child"])
            return start_local_ray(**options)
        attempts[0]["child"] = subprocess.Popen(["sleep", "600"], process_group=options["group"]).pid
        bystanders.append(subprocess.Popen(["sleep", "600"]))
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session_module, "start_local_ray", start)
    monkeypatch.setattr(session_module, "_EXIT_GRACE_S", 0.1)
    with RaySession(num_cpus=1) as session:
        assert ray.is_initialized() and session.dashboard_url == ""
    (bystander,) = bystanders
    assert len(attempts) == 2 and not left and bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_ray_that_does_not_start_is_an_error_with_causes(monkeypatch):
    attempts = []

    def start(**options):
        attempts.append(options)
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session_module, "start_local_ray", start)
    with raises("ray.start-failed", "The current node timed out", "megarl doctor"), RaySession(num_cpus=1):
        pass
    assert len(attempts) == 2 and not ray.is_initialized()


@pytest.mark.parametrize(
    ("error", "code", "value"),
    [  # as Ray 2.60 raises them: wrong or no token; token mode without a token; no Ray on this machine
        (ConnectionError("Failed to connect to Ray cluster at h:1"), "ray.not-joined", "RAY_AUTH_MODE=token"),
        (AuthenticationError("no authentication token was found."), "ray.not-joined", "RAY_AUTH_TOKEN_PATH"),
        (ConnectionError("Could not find any running Ray instance."), "ray.no-cluster", "RAY_ADDRESS"),
    ],
)  # fmt: skip
def test_refused_connection_names_the_variable_of_authentication(monkeypatch, error, code, value):
    def init(**_):
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with raises(code, "auto", error, value), RaySession(address="auto"):
        pass


def test_address_of_a_hung_program_fails_before_ray_waits_for_it():
    with socket.create_server(("127.0.0.1", 0)) as server:
        begin = time.monotonic()
        with (
            raises("ray.no-cluster", "127.0.0.1"),
            RaySession(address=f"127.0.0.1:{server.getsockname()[1]}"),
        ):
            pass
        assert time.monotonic() - begin < 20
