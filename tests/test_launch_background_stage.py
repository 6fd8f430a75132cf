"""A stage in the background of launch/test.sh: its output, its status, and its end by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from interrupts import restore_interrupts

SCRIPT = Path(__file__).resolve().parents[1] / "launch" / "background_stage.sh"


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    """Run bash commands in a process group, like a terminal."""
    return subprocess.Popen(
        ["bash", "-c", f'set -euo pipefail; source "{SCRIPT}"\n{code}'],
        cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, preexec_fn=restore_interrupts, start_new_session=True,
    )  # fmt: skip


def has_ended(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def wait_for(path: Path) -> int:
    """Return the number in a file that a process writes."""
    for _ in range(200):
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["ends first", "ends last"])
@pytest.mark.parametrize("code", [0, 3])
def test_the_output_is_printed_whole_and_after_that_of_the_other_stages(
    tmp_path: Path, seconds: float, code: int
) -> None:
    """The status of the stage reaches the script, also if another stage failed before."""
    stage = f"stage() {{ echo one; sleep {seconds}; echo two >&2; return {code}; }}"
    run = start(f"{stage}\nstart_stage stage\nsleep 0.5; false || echo other\nfinish_stage || echo status $?", tmp_path)
    output, _ = run.communicate(timeout=30)
    assert output.split("\n") == ["other", "one", "two", *([f"status {code}"] if code else []), ""]
    assert run.returncode == 0 and not list(tmp_path.glob("tmp.*"))


def test_a_script_that_fails_ends_its_stage(tmp_path: Path) -> None:
    run = start("start_stage bash -c 'echo $$ >pid; sleep 60'\nwhile [ ! -s pid ]; do sleep 0.1; done; false", tmp_path)
    assert run.wait(timeout=30) == 1
    assert has_ended(wait_for(tmp_path / "pid"))


@pytest.mark.parametrize("moment", ["during another stage", "while its output is printed"])
def test_ctrl_c_ends_the_stage_and_its_later_commands(tmp_path: Path, moment: str) -> None:
    """The stage has its time to clean up, and no stage follows. Another stage may end with a code of its own."""
    wait = "while :; do sleep 0.1; done"
    stage = f"bash -c 'echo $$ >pid; trap \"echo >cleaned; exit 2\" INT; {wait}'; echo >next"
    other = f"bash -c 'trap \"exit 2\" INT; {wait}' || true" if "other" in moment else "true"
    run = start(f"stage() {{ {stage}; }}\nstart_stage stage\n{other}\nfinish_stage\necho later", tmp_path)
    pid = wait_for(tmp_path / "pid")
    time.sleep(0.5)  # the other stage, or tail, has started
    os.killpg(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=30)
    assert run.returncode == 130 and "later" not in output
    assert has_ended(pid) and (tmp_path / "cleaned").exists() and not (tmp_path / "next").exists()
    assert not list(tmp_path.glob("tmp.*"))
