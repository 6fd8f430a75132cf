"""Trackers in processes of their own. The steps are few and the pauses short; nothing is measured in seconds."""

from __future__ import annotations

import json
import socket
import threading
import time

import psutil
import pytest
from tracking_kinds import CannotBeImported, FileTracker, WithoutLogin

from megarl.errors import ConfigError
from megarl.tracking import RunInfo, open_trackers
from megarl.tracking.apart.courier import Courier, Patience

QUICK = Patience(queued=50, attempts=3, first_pause_s=0.05, longest_pause_s=0.2)


@pytest.fixture
def start(tmp_path):
    """``start(kind, behaviour by step, ...)``: a courier, and the lines that it tells."""
    couriers = []

    def begin(config=None, kind=FileTracker, patience=QUICK, timeout_s=60.0):
        told = []
        run = RunInfo("p", "n", tmp_path, config or {}, timeout_s=timeout_s, logs=tmp_path / "logs")
        couriers.append(Courier(f"tracking_kinds.{kind.__name__}", run, told.append, patience))
        return couriers[-1], told

    yield begin
    for courier in couriers:
        courier._end_process()


def log(courier, steps):
    for step in steps:
        courier.log({"a": float(step)}, step)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def arrived(folder):
    lines = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    return [line if line == "finish" else line[0] for line in lines]


def test_all_arrives_in_order_and_nothing_is_told(start, tmp_path):
    courier, told = start()
    courier.wait_checked()
    log(courier, range(1, 31))
    courier.finish()
    assert arrived(tmp_path) == [*range(1, 31), "finish"]
    assert (told, courier.delivered, courier.dropped) == ([], 30, 0)


def test_a_refused_record_is_dropped_and_counted_and_the_others_arrive(start, tmp_path):
    courier, told = start({"2": "refuse"})
    log(courier, range(1, 5))
    wait_for(lambda: courier.delivered == 3)
    courier.finish()
    assert arrived(tmp_path) == [1, 3, 4, "finish"]
    assert "ValueError: not a number" in told[0] and "logs/tracker-FileTracker.log" in told[0]
    assert "1 of 4 records did not arrive" in told[-1] and "look into the file" in told[-1]
    log_text = (tmp_path / "logs" / "tracker-FileTracker.log").read_text()
    assert log_text.count("ValueError: not a number") == QUICK.attempts and "Traceback" in log_text


@pytest.mark.parametrize("behaviour", ["die once", "hang once"])
def test_after_a_death_or_a_hang_a_new_process_goes_on_with_the_same_record(start, tmp_path, behaviour):
    courier, told = start({"2": behaviour}, timeout_s=5.0)
    log(courier, range(1, 5))
    wait_for(lambda: courier.delivered == 4)
    courier.finish()
    assert arrived(tmp_path) == [1, 2, 3, 4, "finish"]
    reason = "its process ended (3)" if behaviour == "die once" else "no answer to log within 5 s"
    assert len(told) == 2 and reason in told[0] and "works again" in told[1] and courier.dropped == 0


def test_what_waits_while_nobody_listens_arrives_later_but_for_what_exceeds_the_bound(start, tmp_path):
    courier, told = start({"closed": str(tmp_path / "listens")}, patience=Patience(3, 3, 0.05, 0.1))
    log(courier, [1])
    wait_for(lambda: told)
    log(courier, range(2, 9))
    (tmp_path / "listens").touch()
    wait_for(lambda: courier.delivered == 4)
    courier.finish()
    assert arrived(tmp_path) == [1, 6, 7, 8, "finish"], "the one under way, and the newest three"
    assert "ConnectionError: nobody listens" in told[0] and "works again" in told[1]
    assert "4 of 8 records did not arrive" in told[2]


def test_a_tracker_that_never_opens_does_not_keep_the_run_from_its_end(start, tmp_path):
    courier, told = start({"closed": str(tmp_path / "never")})
    log(courier, range(1, 5))
    wait_for(lambda: told)
    courier.finish()
    assert len(told) == 2 and "4 of 4 records did not arrive (ConnectionError: nobody listens)" in told[1]


def test_a_tracker_that_hangs_at_the_end_is_killed_and_it_is_told(start, tmp_path):
    courier, told = start({"finish": "hang"}, timeout_s=3.0)
    log(courier, [1])
    wait_for(lambda: courier.delivered == 1)
    pid = courier._process.pid
    courier.finish()
    assert not psutil.pid_exists(pid)
    late = "it did not send all in time (no answer to finish within 3 s); look into the file"
    assert told == [f"tracker tracking_kinds.FileTracker: {late}"]


def test_should_the_driver_be_gone_the_tracker_ends_in_order(start, tmp_path):
    courier, _ = start()
    log(courier, [1])
    wait_for(lambda: courier.delivered == 1)
    courier._process._connection.close()
    wait_for(lambda: "finish" in arrived(tmp_path))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(WithoutLogin, "^there is no login"), (CannotBeImported, "'halfinstalled' cannot be imported")],
)
def test_a_wrong_set_up_is_an_error_at_the_start(start, kind, message):
    courier, told = start(kind=kind)
    with pytest.raises(ConfigError, match=message):
        courier.wait_checked()
    courier.finish()
    assert told == []


@pytest.fixture
def silent_server():
    """A server that takes connections and requests, and never answers."""
    taken, listener = [], socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            try:
                taken.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], taken
    listener.close()
    for connection in taken:
        connection.close()


@pytest.fixture
def closed_port():
    """A port that refuses connections."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def real_trackers(port, tmp_path, monkeypatch):
    """Weights & Biases, SwanLab and MLflow, all with a server at a port of this machine."""
    url = f"http://127.0.0.1:{port}"
    for name in ("WANDB_MODE", "SWANLAB_MODE", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("SWANLAB_API_HOST", url + "/api")
    monkeypatch.setenv("SWANLAB_WEB_HOST", url)
    monkeypatch.setenv("SWANLAB_API_KEY", "0" * 21)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    told = []
    run = RunInfo("p", "n", tmp_path / "run", {"a": 1}, run_id="0" * 20, timeout_s=3.0, logs=tmp_path / "logs")
    return open_trackers(["wandb", "swanlab", "mlflow", "jsonl"], run, told.append), told


@pytest.mark.parametrize("kind", ["silent", "refusing"])
def test_the_real_packages_without_their_servers_hold_nothing_up(
    request, silent_server, closed_port, tmp_path, monkeypatch, kind
):
    """Were any call to wait for the server, the test would not end: it never answers."""
    trackers, told = real_trackers(silent_server[0] if kind == "silent" else closed_port, tmp_path, monkeypatch)
    processes = [courier._process.pid for courier in trackers.trackers[:3] if courier._process]
    for step in range(1, 4):
        trackers.log({"critic/score/mean": 0.5}, step)
    trackers.log_samples([{"input": "q", "output": "a"}], 3)
    if kind == "silent":
        wait_for(lambda: len(silent_server[1]) >= 3)
    wait_for(lambda: len({line.split()[1] for line in told}) == 3)
    trackers.finish()
    print("\n".join(told))
    for name in ("wandb", "swanlab", "mlflow"):
        assert sum(line.startswith(f"tracker {name} fails: ") for line in told) == 1
        assert any(line.startswith(f"tracker {name}: 4 of 4 records did not arrive") for line in told)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert not any(map(psutil.pid_exists, processes))


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_no_login_is_told_before_anything_starts(tmp_path, monkeypatch, name):
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"trainer\.logger='{name}': there is no login.*{name} login"):
        open_trackers([name], RunInfo("p", "n", tmp_path / "run"), print)
