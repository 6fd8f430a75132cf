"""Log files: all that a process writes, by whatever means, is in its file."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.base.logs import ProcessLogs, driver_log, tail

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
WRITES = """
import ctypes, logging, os, subprocess, sys, warnings
from pathlib import Path
from megarl.base.logs import redirect_output
path = redirect_output(Path(sys.argv[1]), sys.argv[2], " on a node")
print("printed")
print("in", "two", sep="\\n", file=sys.stderr)
ctypes.CDLL(None).printf(b"from C\\n")
os.write(2, b"raw\\n")
subprocess.run(["echo", "a child"], check=True)
logging.getLogger("megarl.workers").warning("a warning")
logging.getLogger("megarl.workers").debug("a detail")
logging.getLogger("elsewhere").debug("their detail")
warnings.warn("an old function")
def fails():
    raise ValueError("no good")
"""


def run(script, *arguments):
    return subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("level", ["INFO", "DEBUG", "ERROR"])
def test_all_output_of_a_process_is_in_its_log_file_only(tmp_path, level):
    file = ProcessLogs(tmp_path / "logs").file("actor", 3)
    done = run(WRITES + "fails()", file, level)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    text = file.read_text(encoding="utf-8")
    assert file == tmp_path / "logs" / "actor-3.log"
    for line in ("OUT     printed", "ERR     in", "ERR     two"):
        assert re.search(rf"^{STAMP}{line}$", text, re.M), line
    for line in ("from C", "raw", "a child"):
        assert re.search(rf"^{line}$", text, re.M), line
    assert "ValueError: no good" in text and "Traceback" in text
    assert bool(re.search(rf"^{STAMP}WARNING megarl.workers: a warning$", text, re.M)) == (level != "ERROR")
    assert ("a detail" in text) == (level == "DEBUG") and "their detail" not in text
    assert ("actor-3 begins, pid " in text and " on a node" in text) == (level != "ERROR")


def test_crash_in_c_code_leaves_stack_and_unflushed_output(tmp_path):
    file = tmp_path / "actor-0.log"
    crash = "def inner():\n    ctypes.CDLL(None).printf(b'last words\\n')\n    ctypes.string_at(0)\ninner()\n"
    assert run(WRITES + crash, file, "INFO").returncode < 0
    text = file.read_text(encoding="utf-8")
    assert "last words" in text and "Fatal Python error: Segmentation fault" in text and "in inner" in text


def test_resumed_process_appends(tmp_path):
    file = tmp_path / "actor-0.log"
    for _ in range(2):
        run(WRITES, file, "INFO")
    assert file.read_text(encoding="utf-8").count("actor-0 begins") == 2


def test_unwritable_folder_is_replaced_and_noted(tmp_path, monkeypatch):
    folder = tempfile.mkdtemp(dir="/tmp")  # a longer path would not do for sockets
    monkeypatch.setenv("TMPDIR", folder)
    (tmp_path / "file").touch()  # no user can create a folder below a file, not even root
    run(WRITES, tmp_path / "file" / "logs" / "actor-0.log", "INFO")
    (file,) = Path(folder).rglob("actor-0.log")
    assert f"because {tmp_path}/file/logs/actor-0.log is not writable" in file.read_text(encoding="utf-8")


def test_driver_log_has_the_final_exception(tmp_path):
    with pytest.raises(ZeroDivisionError), driver_log(tmp_path / "logs", "INFO") as path:
        1 / 0  # noqa: B018
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"^{STAMP}ERROR   megarl.base.logs: driver ends by ZeroDivisionError$", text, re.M)
    assert "Traceback" in text and "division by zero" in text


def test_tail_of_a_long_file(tmp_path):
    file = tmp_path / "long.log"
    file.write_text(":job_id:0100\n" + "".join(f"line {number}\n" for number in range(100000)), encoding="utf-8")
    assert tail(file, 2) == "line 99998\nline 99999"
    assert tail(tmp_path / "none.log") == ""


FULL_DISK = """
import sys
from megarl.base.logs import steady_output
from megarl.base.run_writer import RUN_WRITER
from megarl.tracking import Console
with steady_output(), Console() as console:
    console.message("step " * 10000)
    print("x", flush=True)
open(sys.argv[1], "w").write(str(RUN_WRITER.refused_output))
"""


def test_console_on_a_full_disk_ends_no_run(tmp_path):
    """The interpreter itself fails, too, with status 120, if the last text cannot be written at its exit."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "done")]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=300).returncode == 0
    assert 40_000 < int((tmp_path / "done").read_text(encoding="utf-8")) < 70_000, (
        "of 50,000 characters; the rest was in a buffer"
    )
