"""The local sandbox: programs that try to exceed their limits and to escape."""

import os

import psutil
import pytest

from megarl.rewards.sandbox import LocalSandbox, SandboxLimits, isolation_problem, protections

LIMITS = SandboxLimits(timeout_s=4, memory_mb=256, max_processes=8, disk_mb=4, output_mb=1)


@pytest.fixture(scope="module")
def run():
    assert isolation_problem() is None
    return LocalSandbox(LIMITS).run


def test_program_reads_stdin_and_writes_files(run):
    source = "import math, sys\nprint(sum(map(int, sys.stdin.read().split())), math.gcd(12, 18))"
    execution = run(source, "1 2\n3\n")
    assert execution.succeeded and execution.stdout == "6 6\n"
    execution = run("open('a.txt', 'w').write('ä'); print(open('/tmp/a.txt').read()); raise SystemExit(3)")
    assert (execution.status, execution.exit_code, execution.stdout) == ("finished", 3, "ä\n")
    execution = run("1 / 0")
    assert execution.exit_code == 1 and "ZeroDivisionError" in execution.stderr


def test_a_program_observes_all_protections_but_a_seccomp_filter():
    assert [name for name, active in protections().items() if not active] in ([], ["seccomp filter"])


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


def test_no_network(run):
    import errno
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0megarl-test")
        local.listen()
        execution = run(NETWORK.replace("PORT", str(server.getsockname()[1])))
    assert execution.stdout.split() == [str(errno.ENETUNREACH), str(errno.ENETUNREACH), str(errno.ECONNREFUSED)]


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


def test_outside_files_are_not_accessible(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_SECRET", "key")
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    execution = run(FILES.replace("OUTSIDE", repr(str(secret))))
    assert execution.stdout.splitlines() == ["[]", "False None ['main.py']"], execution
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
def test_limits(run, source, stderr):
    execution = run(source)
    assert not execution.succeeded
    assert stderr in execution.stderr or (execution.exit_code is not None and execution.exit_code < 0), execution


BOMB = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"fork-bomb")  # PR_SET_NAME, inherited by the children
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except BlockingIOError:
    print(count)
"""


def test_fork_bomb_is_limited_and_cleaned_up(run):
    execution = run(BOMB)
    assert 1 <= int(execution.stdout) < LIMITS.max_processes
    assert "fork-bomb" not in {process.info["name"] for process in psutil.process_iter(["name"])}


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import os, time; os.fork() or os.setsid(); time.sleep(999)",
    ],
)
def test_timeout_kills_the_program(source):
    execution = LocalSandbox(SandboxLimits(timeout_s=1)).run(source)
    assert execution.status == "timeout" and not execution.succeeded


HOARD = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        memory = bytearray(b"x") * (100 * 2**20)
        time.sleep(1000)
time.sleep(1000)
"""


def test_memory_of_all_processes_together_is_limited(run):
    execution = run(HOARD)
    assert execution.status == "memory_limit" and not execution.succeeded


SHARED = """
import os, time
memory = bytearray(b"x") * (100 * 2**20)
for _ in range(5):
    os.fork() or (time.sleep(0.5), os._exit(0))
time.sleep(0.3)
"""


def test_pages_shared_after_a_fork_count_once(run):
    assert run(SHARED).succeeded


MEMORY_FILES = """
import os, time
files = [os.memfd_create("x") for _ in range(50)]
for file in files:
    for _ in range(4):
        os.write(file, bytes(2**20 - 4096))
        time.sleep(0.005)
"""
SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None)
print([libc.shmget(0, ctypes.c_size_t(2**20), 0o1600) for _ in range(3)])
"""


def test_memory_outside_of_address_spaces_is_limited(run):
    small = LocalSandbox(SandboxLimits(timeout_s=4, memory_mb=128, disk_mb=4))
    assert small.run(MEMORY_FILES).status == "memory_limit"
    assert run(SEGMENTS).stdout == "[-1, -1, -1]\n"


def test_output_limit(run):
    execution = run("while True: print('x' * 10000)")
    assert execution.status == "output_limit" and len(execution.stdout) < 2 * 2**20
    assert not [name for name in os.listdir("/tmp") if name.startswith("megarl-sandbox-")]
