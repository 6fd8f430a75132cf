"""Files below ``/proc``, and files that are empty for a moment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from megarl.base.processes import PAUSE_S, child_pids, process_fields, read_kernel_file, resident_bytes


def test_file_of_a_process() -> None:
    assert read_kernel_file("/proc/self/stat").startswith(f"{os.getpid()} (")


def test_empty_file_is_read_again_and_stays_empty_in_the_end(tmp_path: Path) -> None:
    file = tmp_path / "stat"
    file.write_text("")
    assert read_kernel_file(str(file)) == ""
    later = threading.Timer(2 * PAUSE_S, file.write_text, ("1 (init)",))
    later.start()
    assert read_kernel_file(str(file)) == "1 (init)"
    later.join()


def test_missing_or_unreadable_file_is_empty(tmp_path: Path) -> None:
    assert read_kernel_file(str(tmp_path / "none")) == read_kernel_file(str(tmp_path)) == ""


def test_fields_of_a_process_equal_psutils() -> None:
    """A process waits; then it has ended."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert process.pid in child_pids(os.getpid()) and child_pids(process.pid) == []
        assert int(process_fields(process.pid)[1]) == os.getpid(), "the parent"
        assert resident_bytes(process.pid) == psutil.Process(process.pid).memory_info().rss
        process.stdin.close()
        process.wait()
        assert process_fields(process.pid) == child_pids(process.pid) == [] and resident_bytes(process.pid) == 0
    assert resident_bytes() > 2**20


def test_children_of_a_process_that_ends_between_the_reads_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has a folder of threads when the read begins, and ends before its content is listed."""
    with subprocess.Popen(["sleep", "60"]) as process:
        list_folder = os.listdir

        def end_and_list(path: str) -> list[str]:
            process.kill()
            process.wait()
            return list_folder(path)

        monkeypatch.setattr(os, "listdir", end_and_list)
        assert child_pids(process.pid) == []
