"""A stage in the background of launch/test.sh: its output, its status, and its end by Ctrl-C."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.interrupts import restore_interrupts
from support.waits import LIMIT_S, wait_for_end, wait_until

from megarl.base.processes import child_pids, read_kernel_file

SCRIPT = Path(__file__).resolve().parents[1] / "launch" / "background_stage.sh"


def start(code, folder):
    """Run bash commands in a process group, like a terminal."""
    return subprocess.Popen(
        ["bash", "-c", f'set -euo pipefail; source "{SCRIPT}"\n{code}'],
        cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, preexec_fn=restore_interrupts, start_new_session=True,
    )  # fmt: skip


def wait_for(path):
    """Return the number in a file that a process writes."""
    wait_until(lambda: path.exists() and bool(path.read_text(encoding="utf-8").strip()))
    return int(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["ends first", "ends last"])
@pytest.mark.parametrize("code", [0, 3])
def test_the_output_is_printed_whole_and_after_that_of_the_other_stages(tmp_path, seconds, code):
    """The status of the stage reaches the script, also if another stage failed before."""
    stage = f"stage() {{ echo one; sleep {seconds}; echo two >&2; return {code}; }}"
    run = start(f"{stage}\nstart_stage stage\nsleep 0.5; false || echo other\nfinish_stage || echo status $?", tmp_path)
    output, _ = run.communicate(timeout=LIMIT_S)
    assert output.split("\n") == ["other", "one", "two", *([f"status {code}"] if code else []), ""]
    assert run.returncode == 0 and not list(tmp_path.glob("tmp.*"))


def test_a_script_that_fails_ends_its_stage(tmp_path):
    run = start("start_stage bash -c 'echo $$ >pid; sleep 60'\nwhile [ ! -s pid ]; do sleep 0.1; done; false", tmp_path)
    assert run.wait(timeout=LIMIT_S) == 1
    wait_for_end(wait_for(tmp_path / "pid"))


@pytest.mark.parametrize("moment", ["during another stage", "while its output is printed"])
def test_ctrl_c_ends_the_stage_and_its_later_commands(tmp_path, moment):
    """The stage has its time to clean up, and no stage follows. Another stage may end with a code of its own."""
    wait = "while :; do sleep 0.1; done"
    stage = f"bash -c 'trap \"echo >cleaned; exit 2\" INT; echo $$ >pid; {wait}'; echo >next"
    other = f"bash -c 'trap \"exit 2\" INT; echo $$ >other; {wait}' || true" if "other" in moment else "true"
    run = start(f"stage() {{ {stage}; }}\nstart_stage stage\n{other}\nfinish_stage\necho later", tmp_path)
    pid = wait_for(tmp_path / "pid")
    if "other" in moment:
        wait_for(tmp_path / "other")
    else:
        wait_until(lambda: "tail\n" in [read_kernel_file(f"/proc/{child}/comm") for child in child_pids(run.pid)])
    os.killpg(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 130 and "later" not in output
    wait_for_end(pid)
    assert (tmp_path / "cleaned").exists() and not (tmp_path / "next").exists()
    assert not list(tmp_path.glob("tmp.*"))
