"""Processes of SGLang as forks: their environment, the signal of a failure, and their end with the engine's process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megarl.base.processes import wait_for_ends

PARENT = Path(__file__).with_name("forking_parent.py")


@pytest.mark.parametrize("own", [True, False])
def test_forks_have_the_environment_of_their_start_and_their_failure_reaches_the_engine(own):
    """Also those of a server that is a fork of the engine's process."""
    done = subprocess.run(
        [sys.executable, PARENT, *["own"] * own], capture_output=True, text=True, check=True, timeout=120
    )
    reports = json.loads(done.stdout)
    assert [report["variable"] for report in reports] == ["one", "two", None]
    assert len({report["server"] for report in reports}) == 1, "one server forks all"
    for report in reports:
        assert report["inherits"] == own
        assert report["starter"] == report["is_starter"] != report["server"]
        assert report["default"] and report["signals"] == [signal.SIGQUIT]


def test_forks_end_with_a_killed_engine():
    with subprocess.Popen([sys.executable, PARENT, "sleep"], stdout=subprocess.PIPE, text=True) as parent:
        pids = json.loads(parent.stdout.readline())
        family = [psutil.Process(pid) for pid in (pids["pid"], pids["server"])]
        os.kill(parent.pid, signal.SIGKILL)
        assert not wait_for_ends(family, 60)
