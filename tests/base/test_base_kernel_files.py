"""Files below ``/proc``, and files that are empty for a moment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from megarl.base.kernel_files import PAUSE_S, child_pids, process_fields, read_kernel_file, resident_bytes


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
