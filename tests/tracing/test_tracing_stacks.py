"""Stacks of real processes: running, holding the GIL, stopped, or not serving their stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megarl.tracing import stacks
from megarl.tracing.stacks import process_state, take_reports

SERVES = "from megarl.tracing.stacks import serve_stacks; serve_stacks()\n"
BUSY = """
import threading
def deep(n):
    return 0 if n == 0 else 1 + deep(n - 1)
def work():
    while True:
        deep(300)
for number in range(4):
    threading.Thread(target=work, name=f"busy {number}", daemon=True).start()
"""
WAIT = "import time\ndef idle():\n    print('up', flush=True)\n    time.sleep(600)\nidle()\n"
MASKED = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
LOCKS_LATER = "import re, threading; threading.Timer(0.2, re.match, ('(a+)+b', 'a' * 99)).start()\n"
LOCKED = "import re\ndef hang():\n    print('up', flush=True)\n    re.match('(a+)+b', 'a' * 99)\nhang()\n"


@pytest.fixture
def start():
    """Start a program that prints ``up``."""
    started: list[subprocess.Popen[str]] = []

    def begin(code):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def patient(monkeypatch):
    """Gives processes that can write their stacks the time for it on a loaded machine."""
    monkeypatch.setattr(stacks, "LONGEST_ANSWER_S", 120.0)


@pytest.mark.usefixtures("patient")
def test_running_threads_survive_an_observation(start):
    """A dump without Python's lock ends such a process at the first attempt or soon after it."""
    process = start(SERVES + BUSY + WAIT)
    for _ in range(30):
        (report,) = take_reports([process.pid])
        assert [frame.function for frame in report.frames] == ["idle", "<module>"]
        assert all(f"[busy {number}]" in report.stacks for number in range(4)) and " in work" in report.stacks
    assert process.poll() is None


def test_process_that_holds_the_gil_is_read_by_signal(start):
    process = start(SERVES + LOCKED)
    (report,) = take_reports([process.pid])
    # Its thread wrote them: it does not hold the GIL yet. Or it had no CPU time to write any.
    while "[MainThread]" in report.stacks or not report.stacks:
        (report,) = take_reports([process.pid])
    # CPython's matching of expressions never gives the lock up.
    assert [frame.function for frame in report.frames][-2:] == ["hang", "<module>"] and process.poll() is None


def test_main_thread_is_found_if_another_thread_takes_the_signal(start):
    """``faulthandler`` calls the thread that takes the signal the current one."""
    process = start(SERVES + MASKED + LOCKS_LATER + WAIT)
    (report,) = take_reports([process.pid])
    while "[MainThread]" in report.stacks or not report.stacks:  # no thread holds the GIL yet, or had CPU time
        (report,) = take_reports([process.pid])
    assert [frame.function for frame in report.frames] == ["idle", "<module>"]
    assert "_answer" in report.stacks.partition("Current thread")[2].splitlines()[1]


@pytest.mark.usefixtures("patient")
def test_stopped_process_is_not_signaled(start):
    process = start(SERVES + WAIT)
    os.kill(process.pid, signal.SIGSTOP)
    while process_state(process.pid) != "stopped":
        time.sleep(0.01)
    (report,) = take_reports([process.pid])
    assert (report.state, report.stacks) == ("stopped", "")
    os.kill(process.pid, signal.SIGCONT)
    (report,) = take_reports([process.pid])
    assert report.frames[0].function == "idle"


def test_process_without_served_stacks_is_not_signaled(start):
    unaware, gone = start(WAIT), start(WAIT)
    gone.kill()
    gone.wait()
    first, second = take_reports([unaware.pid, gone.pid])
    assert first.stacks == "" and "time.sleep" in first.command and unaware.poll() is None
    assert second.state == "dead"


@pytest.mark.usefixtures("patient")
def test_several_processes_are_observed_at_once(start):
    from megarl.tracing.stacks import serve_stacks

    serve_stacks()
    processes = [start(SERVES + WAIT) for _ in range(2)]
    reports = take_reports([os.getpid(), *(process.pid for process in processes)])
    functions = {frame.function for frame in reports[0].frames}
    assert "test_several_processes_are_observed_at_once" in functions
    assert [report.frames[0].function for report in reports[1:]] == ["idle", "idle"]


def test_a_process_that_does_not_answer_takes_no_time_from_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "LONGEST_ANSWER_S", 0.1)
    for name, text in (("silent", ""), ("written", "Thread")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = {1: tmp_path / "silent", 2: tmp_path / "written", 3: tmp_path / "gone"}
    assert stacks._read_stacks(files) == {1: "", 2: "Thread", 3: ""}
