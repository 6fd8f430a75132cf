"""Programs that try what they must not, in the sandbox of this machine."""

import os

import psutil
import pytest

from megarl.rewards.sandbox import LocalSandbox, SandboxLimits, isolation_problem

LIMITS = SandboxLimits(timeout_s=4, memory_mb=256, max_processes=8, disk_mb=4, output_mb=1)


@pytest.fixture(scope="module")
def run():
    assert isolation_problem() is None
    return LocalSandbox(LIMITS).run


def test_a_program_reads_and_writes(run):
    source = "import math, sys\nprint(sum(map(int, sys.stdin.read().split())), math.gcd(12, 18))"
    done = run(source, "1 2\n3\n")
    assert done.succeeded and done.stdout == "6 6\n"
    done = run("open('a.txt', 'w').write('ä'); print(open('/tmp/a.txt').read()); raise SystemExit(3)")
    assert (done.status, done.exit_code, done.stdout) == ("finished", 3, "ä\n")
    done = run("1 / 0")
    assert done.exit_code == 1 and "ZeroDivisionError" in done.stderr


NETWORK = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_INET, ("192.0.2.1", 80)),
                        (socket.AF_UNIX, "\\0megarl-test")):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError as error:
        print(error.errno)
"""


def test_there_is_no_network(run):
    import errno
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0megarl-test")
        local.listen()
        done = run(NETWORK.replace("PORT", str(server.getsockname()[1])))
    assert done.stdout.split() == [str(errno.ENETUNREACH), str(errno.ENETUNREACH), str(errno.ECONNREFUSED)]


FILES = """
import os
for path in ("/usr/x", "/x", "/dev/x", "/etc/x", OUTSIDE, "/proc/sys/kernel/hostname"):
    try:
        open(path, "w")
        print("written", path)
    except OSError:
        pass
print([name for name in os.listdir("/") if name in ("home", "var", "mnt", "boot", "sys", "run")])
print(os.path.exists(OUTSIDE), os.environ.get("MEGARL_SECRET"), [n for n in os.listdir(".") if os.path.isfile(n)])
"""


def test_files_outside_are_neither_written_nor_seen(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_SECRET", "key")
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    done = run(FILES.replace("OUTSIDE", repr(str(secret))))
    assert done.stdout.splitlines() == ["[]", "False None ['main.py']"], done
    assert secret.read_text() == "untouched"


@pytest.mark.parametrize(
    ("source", "stderr"),
    [
        ("x = bytearray(600 * 2**20)", "MemoryError"),
        ("open('big', 'wb').write(bytes(6 * 2**20))", "OSError"),
        ("for n in range(9):\n    open(str(n), 'wb').write(bytes(2**20))", "No space left"),
        ("import os\nfiles = [open('/dev/null') for _ in range(100)]", "Too many open files"),
        ("import os\nos.setuid(0)", "PermissionError"),
        ("import ctypes\nl = ctypes.CDLL(None)\nassert l.mount(b'n', b'/', b'tmpfs', 0, None) == 0", "AssertionError"),
        ("import ctypes\nl = ctypes.CDLL(None)\nassert l.unshare(0x10000000) == 0", "AssertionError"),
        ("import os\nos.kill(1, 9)", "PermissionError"),
        ("import os\nos.chroot('/')", "PermissionError"),
    ],
    ids=["memory", "file", "disk", "open files", "setuid", "mount", "namespace", "kill", "chroot"],
)
def test_limits_hold(run, source, stderr):
    done = run(source)
    assert not done.succeeded
    assert stderr in done.stderr or (done.exit_code is not None and done.exit_code < 0), done


BOMB = """
import os, time
made = 0
try:
    while made < 1000:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except BlockingIOError:
    print(made)
"""


def test_a_fork_bomb_stops_at_its_limit_and_leaves_nothing(run):
    before = {process.pid for process in psutil.process_iter()}
    done = run(BOMB)
    assert 1 <= int(done.stdout) < LIMITS.max_processes
    own = [process for process in psutil.process_iter() if process.pid not in before]
    assert not [process for process in own if _is_program(process)]


def _is_program(process):
    try:
        return "/sandbox/main.py" in process.cmdline()
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import os, time; os.fork() or os.setsid(); time.sleep(999)",
    ],
)
def test_a_program_that_does_not_end_is_ended(source):
    done = LocalSandbox(SandboxLimits(timeout_s=1)).run(source)
    assert done.status == "timeout" and not done.succeeded


def test_output_is_bounded(run):
    done = run("while True: print('x' * 10000)")
    assert done.status == "output_limit" and len(done.stdout) < 2 * 2**20
    assert not [name for name in os.listdir("/tmp") if name.startswith("megarl-sandbox-")]
