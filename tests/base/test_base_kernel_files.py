"""Files below ``/proc``, and files that are empty for a moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from megarl.base.kernel_files import PAUSE_S, read_kernel_file


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
