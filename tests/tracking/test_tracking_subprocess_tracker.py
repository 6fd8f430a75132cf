"""Subprocess trackers: retries, dropped records, hangs, deaths, and the real packages without a server."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading

import psutil
import pytest
from subprocess_trackers import CannotBeImported, FileTracker, WithoutLogin
from support.expected_errors import raises
from support.waits import wait_until

from megarl.base.ports import held_port
from megarl.tracking import RunInfo, check_trackers, open_trackers
from megarl.tracking.subprocess_tracker import SubprocessTracker


class QuickTracker(SubprocessTracker):
    attempts = 3
    pauses_s = 0.05, 0.2


@pytest.fixture
def start(tmp_path):
    """``start(config, kind, ...)``: a subprocess tracker and its messages."""
    trackers = []

    def begin(config=None, kind=FileTracker, capacity=50, timeout_s=60.0):
        messages = []
        run = RunInfo("p", "n", tmp_path, config or {}, timeout_s=timeout_s, logs=tmp_path / "logs")
        trackers.append(QuickTracker(f"subprocess_trackers.{kind.__name__}", run, messages.append, capacity))
        return trackers[-1], messages

    yield begin
    for tracker in trackers:
        tracker._end_process()


def log(tracker, steps):
    for step in steps:
        tracker.log({"a": float(step)}, step)


def arrived(folder):
    lines = [json.loads(line) for line in (folder / "records").read_text(encoding="utf-8").splitlines()]
    return [line if line == "finish" else line[0] for line in lines]


def test_records_arrive_in_order_without_messages(start, tmp_path):
    tracker, messages = start()
    log(tracker, range(1, 31))
    tracker.finish()
    assert arrived(tmp_path) == [*range(1, 31), "finish"]
    assert (messages, tracker.delivered, tracker.dropped) == ([], 30, 0)


def test_refused_record_is_dropped_and_counted(start, tmp_path):
    tracker, messages = start({"2": "refuse"})
    log(tracker, range(1, 5))
    wait_until(lambda: tracker.delivered == 3)
    tracker.finish()
    assert arrived(tmp_path) == [1, 3, 4, "finish"]
    assert "ValueError: not a number" in messages[0] and "logs/tracker-FileTracker.log" in messages[0]
    assert "1 of 4 records did not arrive" in messages[-1] and "look into the file" in messages[-1]
    log_text = (tmp_path / "logs" / "tracker-FileTracker.log").read_text(encoding="utf-8")
    assert log_text.count("ValueError: not a number") == QuickTracker.attempts and "Traceback" in log_text


@pytest.mark.parametrize("behaviour", ["die once", "hang once"])
def test_new_process_retries_the_record_after_a_death_or_a_hang(start, tmp_path, monkeypatch, behaviour):
    call = SubprocessTracker._call

    def call_within_limit(tracker, name, *args, timeout_s):
        """Wait for a second for the call that hangs, and for the others as long as a loaded machine needs."""
        hangs = behaviour == "hang once" and name == "log" and args[1] == 2 and not (tmp_path / "hung").exists()
        return call(tracker, name, *args, timeout_s=1.0 if hangs else timeout_s)

    monkeypatch.setattr(SubprocessTracker, "_call", call_within_limit)
    tracker, messages = start({"2": behaviour})
    log(tracker, range(1, 5))
    wait_until(lambda: tracker.delivered == 4)
    tracker.finish()
    assert arrived(tmp_path) == [1, 2, 3, 4, "finish"]
    reason = "its process ended (3)" if behaviour == "die once" else "no reply to log within 1 s"
    assert len(messages) == 2 and reason in messages[0] and "works again" in messages[1] and tracker.dropped == 0


def test_queued_records_arrive_later_up_to_the_capacity(start, tmp_path):
    tracker, messages = start({"closed": str(tmp_path / "listens")}, capacity=3)
    log(tracker, [1])
    wait_until(lambda: messages)
    log(tracker, range(2, 9))
    (tmp_path / "listens").touch()
    wait_until(lambda: tracker.delivered == 4)
    tracker.finish()
    assert arrived(tmp_path) == [1, 6, 7, 8, "finish"], "the current record and the newest three"
    assert "ConnectionError: nobody listens" in messages[0] and "works again" in messages[1]
    assert "4 of 8 records did not arrive" in messages[2]


def test_unreachable_tracker_does_not_delay_the_end(start, tmp_path):
    tracker, messages = start({"closed": str(tmp_path / "never")})
    log(tracker, range(1, 5))
    wait_until(lambda: messages)
    tracker.finish()
    assert len(messages) == 2 and "4 of 4 records did not arrive (ConnectionError: nobody listens)" in messages[1]


def test_hanging_finish_is_killed_and_reported(start, tmp_path):
    tracker, messages = start({"finish": "hang"})
    log(tracker, [1])
    wait_until(lambda: tracker.delivered == 1)
    tracker.run = dataclasses.replace(tracker.run, timeout_s=2.0)  # the start of the process may take longer
    pid = tracker._process.pid
    tracker.finish()
    assert not psutil.pid_exists(pid)
    late = r"it did not send all records in time \(no reply to finish within [0-2] s\); look into the file"
    (message,) = messages
    assert re.fullmatch(rf"tracker subprocess_trackers\.FileTracker: {late}", message)


def test_tracker_finishes_if_the_driver_is_gone(start, tmp_path):
    tracker, _ = start()
    log(tracker, [1])
    wait_until(lambda: tracker.delivered == 1)
    tracker._process.connection.close()
    wait_until(lambda: "finish" in arrived(tmp_path))


@pytest.mark.parametrize(
    ("kind", "code", "named"),
    [(WithoutLogin, "tracking.no-login", ""), (CannotBeImported, "tracking.broken-package", "'halfinstalled'")],
)
def test_wrong_setup_is_an_error_before_the_start(monkeypatch, kind, code, named):
    monkeypatch.setattr("megarl.tracking.tracker.is_installed", lambda package: True)
    with raises(code, named):
        check_trackers([f"subprocess_trackers.{kind.__name__}"])


@pytest.fixture
def silent_server():
    """A server that accepts connections and requests, and never replies."""
    accepted, listener = [], socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            try:
                accepted.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], accepted
    listener.close()
    for connection in accepted:
        connection.close()


@pytest.fixture
def closed_port():
    """A port that refuses connections."""
    with held_port("127.0.0.1") as port:
        yield port


def real_trackers(port, tmp_path, monkeypatch):
    """Weights & Biases, SwanLab and MLflow with a server at a local port."""
    url = f"http://127.0.0.1:{port}"
    for name in ("WANDB_MODE", "SWANLAB_MODE", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("SWANLAB_API_HOST", url + "/api")
    monkeypatch.setenv("SWANLAB_WEB_HOST", url)
    monkeypatch.setenv("SWANLAB_API_KEY", "0" * 21)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    messages = []
    run = RunInfo("p", "n", tmp_path / "run", {"a": 1}, run_id="0" * 20, timeout_s=8.0, logs=tmp_path / "logs")
    return open_trackers(["wandb", "swanlab", "mlflow", "jsonl"], run, messages.append), messages


@pytest.mark.parametrize(
    "kind",
    [
        "silent",
        pytest.param(
            "refusing",
            marks=pytest.mark.release(
                twin="tests/tracking/test_tracking_subprocess_tracker.py::"
                "test_real_packages_without_servers_do_not_block"
            ),
        ),
    ],
)
def test_real_packages_without_servers_do_not_block(request, silent_server, closed_port, tmp_path, monkeypatch, kind):
    """A call that waits for the server would block the test: the server never replies."""
    trackers, messages = real_trackers(silent_server[0] if kind == "silent" else closed_port, tmp_path, monkeypatch)
    processes = [tracker._process.pid for tracker in trackers.trackers[:3] if tracker._process]
    for step in range(1, 4):
        trackers.log({"critic/score/mean": 0.5}, step)
    trackers.log_samples([{"input": "q", "output": "a"}], 3)
    if kind == "silent":
        wait_until(lambda: len(silent_server[1]) >= 3)
    wait_until(lambda: len({line.split()[1] for line in messages}) == 3)
    trackers.finish()
    print("\n".join(messages))
    for name in ("wandb", "swanlab", "mlflow"):
        assert sum(line.startswith(f"tracker {name} fails: ") for line in messages) == 1
        assert any(line.startswith(f"tracker {name}: 4 of 4 records did not arrive") for line in messages)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert not any(map(psutil.pid_exists, processes))


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_missing_login_is_an_error_before_the_start(tmp_path, monkeypatch, name):
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with raises("tracking.no-login", f"trainer.logger='{name}'", f"`{name} login`"):
        check_trackers([name])


KEY = "0" * 40
OTHER_LOGIN = pytest.mark.release(
    twin="tests/tracking/test_tracking_subprocess_tracker.py::test_every_login_of_wandb_is_found_without_the_network"
)


@pytest.mark.parametrize(
    ("variables", "files"),
    [
        ({"WANDB_MODE": "offline"}, {}),
        pytest.param({"WANDB_MODE": "disabled"}, {}, marks=OTHER_LOGIN),
        pytest.param({"WANDB_API_KEY": KEY}, {}, marks=OTHER_LOGIN),
        ({}, {".netrc": f"machine api.wandb.ai\n  login user\n  password {KEY}\n"}),
        pytest.param({}, {".config/wandb/settings": f"[default]\napi_key = {KEY}\n"}, marks=OTHER_LOGIN),
        ({}, {".config/wandb/settings": "[default]\nmode = offline\n"}),
    ],
    ids=["offline", "disabled", "key", "netrc", "key in the settings", "offline in the settings"],
)
def test_every_login_of_wandb_is_found_without_the_network(tmp_path, variables, files):
    """In a process of its own: wandb reads its settings once."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o600)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    code = (
        "import socket, psutil\n"
        "from megarl.tracking import check_trackers\n"
        "def connect(*_): raise AssertionError('the network is used')\n"
        "socket.getaddrinfo = connect\n"
        "check_trackers(['wandb'])\n"
        "assert not psutil.Process().children()\n"
    )
    env = {**inherited, "HOME": str(tmp_path), "NETRC": str(tmp_path / ".netrc"), **variables}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
