"""Stop conditions: deadlines with time for a save, and SIGTERM."""

from __future__ import annotations

import os
import pty
import queue
import signal
import sys
import time

import pytest
from support.expected_errors import raises

from megarl.trainer.state.stopping import (
    EXPIRY_VARIABLES,
    FIRST_SAVE_S,
    Deadline,
    StopCondition,
    ends_on_signals,
    find_deadlines,
    process_deadlines,
)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def steps_until_it_ends(seconds, deadline, save_s, spare_s=0.0):
    clock = Clock()
    stop = StopCondition([Deadline(1000 + deadline, "limit"), Deadline(9e9, "later")], spare_s, clock)
    clock.now += 50  # the workers start
    stop.begin()
    for number, step in enumerate(seconds, start=1):
        clock.now += step
        if stop.step_done(save_s):
            assert stop.reason and stop.reason.startswith("limit: ")
            return number
    return 0


@pytest.mark.parametrize(
    ("seconds", "deadline", "save_s", "spare_s", "after"),
    [
        ([10] * 9, 100, 10, 0, 4),  # at 90 s a step and a save would end at 110
        ([10] * 9, 100, 9, 0, 4),
        ([10] * 9, 110, 10, 0, 5),
        ([10] * 9, 110, 10, 1, 4),
        ([10] * 9, 180, None, 0, 7),  # at 120 s: 60 left, 10 + FIRST_SAVE_S needed, so after the one at 120
        ([30, 10, 10, 10, 10], 140, 10, 0, 3),  # the slowest step counts
        ([30, *[10] * 10], 200, 10, 0, 10),  # until it is long ago
        ([10] * 9, 1, 0, 0, 1),
        ([10] * 3, 1000, 10, 0, 0),
    ],
)
def test_the_last_step_that_fits(seconds, deadline, save_s, spare_s, after):
    if save_s is None:
        assert FIRST_SAVE_S == 60
    found = steps_until_it_ends(seconds, deadline, save_s, spare_s)
    elapsed = 50.0
    expected = 0
    for number, step in enumerate(seconds, start=1):  # the same by simulation of what would come next
        elapsed += step
        slowest = max(seconds[max(0, number - 10) : number])
        if elapsed + slowest + (60 if save_s is None else save_s) + spare_s > deadline:
            expected = number
            break
    assert found == expected
    assert found == after or len(seconds) != 9 or save_s is None


def test_without_a_deadline_the_run_continues():
    stop = StopCondition()
    stop.begin()
    assert stop.step_done(1e9) is None


def test_deadlines_of_config_and_environment():
    environment = {EXPIRY_VARIABLES[0]: "1500.5", EXPIRY_VARIABLES[1]: "", "SLURM_JOB_END_TIME": " 1200 "}
    found = find_deadlines(100, 40.0, 1000.0, environment)
    assert [deadline.at for deadline in found] == [140, 540.5, 240]
    assert found[0].name == "trainer.max_wall_seconds=100" and found[2].name == "SLURM_JOB_END_TIME"
    assert find_deadlines(None, 40.0, 1000.0, {}) == []


def test_an_expiry_in_the_past_is_logged_and_ignored(caplog):
    assert find_deadlines(None, 40.0, 1000.0, {"SLURM_JOB_END_TIME": "999"}) == []
    assert "SLURM_JOB_END_TIME=999 is in the past" in caplog.text


@pytest.mark.parametrize("jump", [1e6, -1e6])
def test_a_jump_of_the_clock_neither_ends_the_run_nor_moves_a_deadline(monkeypatch, jump):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 3600))
    deadlines = process_deadlines(7200, time.monotonic())
    stop, before, unix = StopCondition(deadlines), [deadline.at for deadline in deadlines], time.time
    stop.begin()
    assert stop.step_done(1.0) is None
    monkeypatch.setattr(time, "time", lambda: unix() + jump)
    assert stop.step_done(1.0) is None
    assert stop.step_done(7300.0) is not None, "a save that takes longer than the time left"
    monkeypatch.undo()
    assert before == pytest.approx([time.monotonic() + 7200, time.monotonic() + 3600], abs=5)


@pytest.mark.parametrize("text", ["soon", "nan", "2026-01-01T00:00:00Z"])
def test_a_malformed_expiry_is_an_error(text):
    with raises("launch.job-end-time", f"SLURM_JOB_END_TIME='{text}'"):
        find_deadlines(None, 40.0, 1000.0, {"SLURM_JOB_END_TIME": text})


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (signal.SIGTERM, signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, signal.SIGINT, "Ctrl-C"),
        (signal.SIGINT, signal.SIGTERM, "Ctrl-C"),
        (signal.SIGHUP, signal.SIGTERM, "SIGHUP"),
    ],
)
def test_the_first_signal_requests_and_the_second_ends(first, second, reason):
    class Ended(Exception):
        pass

    def end(*_):
        raise Ended

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, end) for number in numbers}
    lines: queue.Queue[str] = queue.Queue()
    try:
        stop = StopCondition()
        with pytest.raises(Ended), ends_on_signals(stop, lines.put):
            os.kill(os.getpid(), first)
            assert stop.requested == reason and stop.reason is None  # the step under way is finished
            line = lines.get(timeout=60)
            assert line.startswith(f"{reason}: the run ends after the current step") and line.endswith(
                " ends it at once"
            )
            os.kill(os.getpid(), signal.SIGHUP)  # a shell and the kernel both send one when a terminal closes
            assert stop.requested == reason
            assert stop.step_done(None) == reason
            os.kill(os.getpid(), second)
        with ends_on_signals(StopCondition()):
            pass
        assert all(signal.getsignal(number) is end for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_closed_terminal_requests_the_end_and_takes_no_output():
    """A process whose terminal closes gets SIGHUP, and each of its writes to it fails."""
    program = (
        "import os, sys\n"
        "from megarl.trainer.state.stopping import StopCondition, ends_on_signals\n"
        "stop = StopCondition()\n"
        "with ends_on_signals(stop):\n"
        "    os.write(3, b'ready')\n"
        "    while stop.requested is None:\n"
        "        pass\n"
        "    print('a line', flush=True)\n"
        "    print('a line', file=sys.stderr, flush=True)\n"
        "    os.write(3, stop.step_done(None).encode())\n"
    )
    read, write = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        os.dup2(write, 3)
        os.execv(sys.executable, [sys.executable, "-c", program])
    os.close(write)
    assert os.read(read, 100) == b"ready"
    os.close(terminal)
    assert os.read(read, 100) == b"SIGHUP"
    assert os.waitpid(pid, 0)[1] == 0
    os.close(read)


def test_an_ignored_ctrl_c_stays_ignored():
    """As in a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopCondition()
        with ends_on_signals(stop):
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_time_limit_counts_from_the_command():
    (deadline,) = find_deadlines(60.0, 1000.0, 5e9, {}, started=970.0)
    assert deadline.at == 1030.0
