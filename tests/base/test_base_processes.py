"""The process table of real processes, and of a folder with the records of a process that is being reaped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megarl.base import processes as module
from megarl.base.child_process import kill_process_tree
from megarl.base.processes import (
    all_processes,
    child_pids,
    child_processes,
    command_line,
    descendants,
    has_ended,
    process_fields,
    process_name,
    read_kernel_file,
    resident_bytes,
    wait_for_ends,
)

FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def parent():
    """A process with a child; the child's process ID is the first line of its output."""
    process = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    yield process
    kill_process_tree(process)
    process.communicate()


@pytest.fixture
def empty_record(tmp_path, monkeypatch):
    """A process whose record is empty, as the kernel shows it for a moment while the process is reaped."""
    process = psutil.Process()
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "stat").write_text("", encoding="utf-8")
    (tmp_path / "stat").write_text(Path("/proc/stat").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(process._proc, "_procfs_path", str(tmp_path))
    return process


def test_family_of_a_process(parent):
    grandchild = int(parent.stdout.readline())
    child = psutil.Process(parent.pid)
    assert child in child_processes() and psutil.Process(grandchild) not in child_processes()
    assert {child.pid, grandchild} <= {process.pid for process in descendants()}
    assert [process.pid for process in descendants(child)] == [grandchild]
    assert {os.getpid(), child.pid, grandchild} <= {process.pid for process in all_processes()}
    assert command_line(child).startswith(f"{sys.executable} -c") and not has_ended(child)


def test_zombie_has_ended_and_is_reaped_by_a_wait(parent):
    child, grandchild = psutil.Process(parent.pid), psutil.Process(int(parent.stdout.readline()))
    assert set(wait_for_ends([child, grandchild], 0.05)) == {child, grandchild}
    child.kill()
    while child.status() != psutil.STATUS_ZOMBIE:
        pass
    assert has_ended(child) and not has_ended(grandchild)
    assert wait_for_ends([child, grandchild], 0.5) == [grandchild] and not psutil.pid_exists(child.pid)
    assert descendants(child) == [] and command_line(child) == ""
    grandchild.kill()
    assert wait_for_ends([grandchild], 30) == []


def test_process_whose_record_stays_empty_has_ended(empty_record):
    with pytest.raises(IndexError):  # the reason for this module
        empty_record.status()
    assert has_ended(empty_record) and list(all_processes()) == []


@pytest.fixture
def in_pause(monkeypatch):
    """``in_pause(number, act)``: acts in a later pause between two reads, the first, second, ..."""

    def plan(number, act):
        pauses = iter(range(1, number + 1))
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: next(pauses, 0) == number and act())
        monkeypatch.setattr(module, "time", clock)

    return plan


def test_empty_record_is_read_again(empty_record, in_pause, tmp_path):
    """A thread that a signal interrupts reads the record of a live process at the second attempt."""
    file, name = tmp_path / str(os.getpid()) / "stat", Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    for read, expected in ((has_ended, False), (process_name, name), (descendants, [])):
        file.write_text("", encoding="utf-8")
        in_pause(1, lambda: file.write_text(Path("/proc/self/stat").read_text(encoding="utf-8"), encoding="utf-8"))
        assert read(empty_record) == expected


def test_file_of_a_process():
    assert read_kernel_file("/proc/self/stat").startswith(f"{os.getpid()} (")


def test_empty_file_is_read_again_and_stays_empty_in_the_end(in_pause, tmp_path):
    file = tmp_path / "stat"
    file.write_text("", encoding="utf-8")
    assert read_kernel_file(str(file)) == ""
    in_pause(2, lambda: file.write_text("1 (init)", encoding="utf-8"))
    assert read_kernel_file(str(file)) == "1 (init)"


def test_missing_or_unreadable_file_is_empty(tmp_path):
    assert read_kernel_file(str(tmp_path / "none")) == read_kernel_file(str(tmp_path)) == ""


def test_fields_of_a_process_equal_psutils():
    """A process waits; then it has ended."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert process.pid in child_pids(os.getpid()) and child_pids(process.pid) == []
        assert int(process_fields(process.pid)[1]) == os.getpid(), "the parent"
        process.send_signal(signal.SIGSTOP)  # else its memory changes between two reads
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert resident_bytes(process.pid) == psutil.Process(process.pid).memory_info().rss
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        process.wait()
        assert process_fields(process.pid) == child_pids(process.pid) == [] and resident_bytes(process.pid) == 0
    assert resident_bytes() > 2**20


def test_children_of_a_process_that_ends_between_the_reads_are_none(monkeypatch):
    """The process has a folder of threads when the read begins, and ends before its content is listed."""
    with subprocess.Popen(["sleep", "60"]) as process:
        list_folder = os.listdir

        def end_and_list(path):
            process.kill()
            process.wait()
            return list_folder(path)

        monkeypatch.setattr(os, "listdir", end_and_list)
        assert child_pids(process.pid) == []
