"""A folder lock excludes a second process, names it, and ends with it, also where the file system has no locks."""

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.expected_errors import raises

from megarl.base import folder_lock as module
from megarl.base.folder_lock import LockHolder, folder_lock

REMEDY = "Wait for its end."
OWN = LockHolder("mine", "/runs/mine")
HOLD = """
import os, sys, time
from pathlib import Path
from megarl.base.folder_lock import LockHolder, folder_lock
with folder_lock(Path(sys.argv[1]), LockHolder("theirs", "/runs/theirs"), ""):
    is_parent = sys.argv[2] == "fork" and os.fork() != 0
    if not is_parent:  # the child is running, and has given the lock up
        print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, with a forked child, that holds ``tmp_path/lock``."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), "fork"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def acquire(file):
    with folder_lock(file, OWN, REMEDY):
        pass


def write_record(file, **fields):
    holder = LockHolder("theirs", "/runs/theirs", **fields)  # type: ignore[arg-type]
    file.write_text(json.dumps(dataclasses.asdict(holder)), encoding="utf-8")


def without_flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_second_process_is_rejected_until_the_first_is_killed(tmp_path, holder, monkeypatch):
    """A forked child of the killed holder, which lives on, does not keep the lock."""
    file = tmp_path / "lock"
    with raises("disk.folder-in-use") as raised:
        acquire(file)
    since = json.loads(file.read_text(encoding="utf-8"))["since"]
    assert str(raised.value) == (
        f"{tmp_path} is in use by another run: theirs in /runs/theirs, process {holder.pid} on {os.uname().nodename}, "
        f"since {since} ({file}). {REMEDY} [disk.folder-in-use]"
    )
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.delattr(module.time, "sleep")  # without a wait
    acquire(file)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_checks_the_process_of_the_record(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", without_flock)
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    with raises("disk.folder-in-use", f"process {holder.pid} on"):
        acquire(tmp_path / "lock")
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    acquire(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []


def test_a_process_with_the_id_of_the_dead_holder_is_not_the_holder(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", without_flock)
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    write_record(tmp_path / "lock")  # this process
    with raises("disk.folder-in-use", f"process {os.getpid()} on"):
        acquire(tmp_path / "lock")
    write_record(tmp_path / "lock", started="1")
    acquire(tmp_path / "lock")


@pytest.mark.parametrize("alive", [True, False])
def test_a_holder_on_another_host_lives_as_long_as_its_time_stamp_changes(tmp_path, monkeypatch, alive):
    """As on a network file system whose ``flock`` each host sees alone."""
    file = tmp_path / "lock"
    write_record(file, host="node7", kernel="another boot")
    if not alive:
        monkeypatch.setattr(module, "SILENT_S", 1.0)
        acquire(file)
        return
    ended = threading.Event()

    def beat():
        while not ended.wait(0.1):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with raises("disk.folder-in-use", "on node7, since ", REMEDY):
            acquire(file)
    finally:
        ended.set()
        thread.join()


def test_the_holder_renews_its_time_stamp(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    with folder_lock(tmp_path / "lock", OWN, REMEDY):
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + 60
        while (tmp_path / "lock").stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / "lock").stat().st_mtime > 0


def test_a_damaged_record_is_stale(tmp_path):
    (tmp_path / "lock").write_text("[" * 100_000, encoding="utf-8")
    acquire(tmp_path / "lock")
