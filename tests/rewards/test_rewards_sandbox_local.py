"""The local sandbox: programs that try to exceed their limits and to escape."""

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap

import psutil
import pytest

from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.sandbox import LocalSandbox, SandboxLimits, isolation_problem, local, protections
from megarl.rewards.sandbox.system_calls import SystemCallFilter

# A loaded machine takes seconds to start a program, or to fill the memory.
LIMITS = SandboxLimits(timeout_s=60, memory_mb=256, max_processes=8, disk_mb=4, output_mb=1)


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


def test_a_program_observes_all_protections():
    assert [protection for protection in protections() if not protection.active] == []


WITHOUT_LIBRARY = """
import sys
sys.modules["pyseccomp"] = None  # as if it were not installed
from megarl.ops.doctor.node.system import check_sandbox
from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.sandbox import LocalSandbox, protections
print([p.name for p in protections() if not p.active][0])
print(LocalSandbox(allow_unfiltered=True).run("print(6 * 7)").stdout, end="")
check = check_sandbox(None)
print(check.status.name, check.observation)
try:
    LocalSandbox().run("print(6 * 7)")
except InfrastructureFailure as error:
    print(error)
"""


def test_without_libseccomp_programs_are_refused_unless_a_key_allows_them():
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, check=True)
    inactive, output, observation, refusal = done.stdout.splitlines()
    assert (inactive, output) == ("seccomp filter", "42")
    assert observation.startswith("WARN ")
    assert "not active: seccomp filter (install libseccomp2, and pyseccomp" in observation and ".[code]" in observation
    assert "pyseccomp" in refusal and "reward.sandbox.allow_unfiltered=true" in refusal


WITHOUT_SECCOMP = """
import errno
import pyseccomp
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule(pyseccomp.ERRNO(errno.EINVAL), "prctl", pyseccomp.Arg(0, pyseccomp.EQ, 22))  # as a kernel without it
rules.load()
from megarl.ops.doctor.node.system import check_sandbox
from megarl.rewards.sandbox import LocalSandbox
print(LocalSandbox(allow_unfiltered=True).run("print(6 * 7)").stdout, check_sandbox(None).observation)
"""


def test_on_a_kernel_without_seccomp_the_doctor_names_the_reason():
    done = subprocess.run([sys.executable, "-c", WITHOUT_SECCOMP], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("42\n")
    assert "not active: seccomp filter (this kernel has no seccomp filters)" in done.stdout


def test_a_filter_that_the_kernel_rejects_refuses_the_program(run, monkeypatch):
    """No program runs without a filter that was compiled for it."""
    monkeypatch.setattr(local, "system_call_filter", lambda: SystemCallFilter(b"\xff" * 8))
    with pytest.raises(InfrastructureFailure, match=r"no sandbox on this machine: .*seccomp filter: Invalid argument"):
        run("print(6 * 7)")


CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number, *arguments in NUMBERS:
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    print("done" if result >= 0 else errno.errorcode[ctypes.get_errno()])
"""
DENIED = {  # name: number on x86-64, number on arm64 (the kernel's tables), arguments, result without a filter
    "mount": (165, 40, (0, 0, 0, 0, 0), "EFAULT"),
    "mount_setattr": (442, 442, (-1, 0, 0, 0, 0), "EINVAL"),
    "unshare": (272, 97, (0,), "done"),
    "setns": (308, 268, (-1, 0), "EBADF"),
    "process_vm_readv": (310, 270, (1, 0, 0, 0, 0, 0), None),
    "ptrace": (101, 117, (0, 0, 0, 0), "done"),
    "pidfd_getfd": (438, 438, (-1, 0, 0), "EBADF"),
    "perf_event_open": (298, 241, (0, 0, -1, -1, 0), None),
    "bpf": (321, 280, (0, 0, 0), None),
    "io_uring_setup": (425, 425, (1, 0), None),
    "userfaultfd": (323, 282, (-1,), None),
    "keyctl": (250, 219, (0, -3, 0, 0, 0), None),
    "add_key": (248, 217, (0, 0, 0, 0, 0), None),
    "memfd_secret": (447, 447, (-1,), None),
    "shmget": (29, 194, (0, 4096, 0o1600), None),
    "msgget": (68, 186, (0, 0o1600), None),
    "semget": (64, 190, (0, 1, 0o1600), None),
    "mq_open": (240, 180, (0, 0, 0, 0), "EFAULT"),
    "init_module": (175, 105, (0, 0, 0), None),
    "kexec_load": (246, 104, (0, 0, 0, 0), None),
    "open_by_handle_at": (304, 265, (-1, 0, 0), None),
    "pivot_root": (155, 41, (0, 0), None),
    "chroot": (161, 51, (0,), "EFAULT"),
    "swapon": (167, 224, (0, 0), None),
    "reboot": (169, 142, (0, 0, 0, 0), None),
    "settimeofday": (164, 170, (0, 0), None),
    "clock_settime": (227, 112, (0, 0), None),
    "clone of a user namespace": (56, 220, (0x10000011, 0, 0, 0, 0), None),
    "clone of a network namespace": (56, 220, (0x40000011, 0, 0, 0, 0), None),
}
NUMBERS = [(row[os.uname().machine != "x86_64"], *row[2]) for row in DENIED.values()]


@pytest.fixture(scope="module")
def refusals(run):
    execution = run(CALLS.replace("NUMBERS", repr(NUMBERS)))
    assert execution.succeeded, execution
    return dict(zip(DENIED, execution.stdout.split(), strict=True))


@pytest.mark.parametrize("name", DENIED)
def test_system_call_is_denied(refusals, name):
    assert refusals[name] == "EPERM"


def test_calls_are_denied_by_the_filter_and_not_for_another_reason(monkeypatch):
    monkeypatch.setattr(local, "system_call_filter", lambda: SystemCallFilter(b"", "off"))
    numbers = [number for number, row in zip(NUMBERS, DENIED.values(), strict=True) if row[3]]
    results = LocalSandbox(LIMITS, allow_unfiltered=True).run(CALLS.replace("NUMBERS", repr(numbers))).stdout.split()
    assert results == [row[3] for row in DENIED.values() if row[3]]


def test_clone3_is_unknown_and_foreign_calls_kill(run):
    clone3 = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall(435, None, 0), ctypes.get_errno())"
    )
    assert run(clone3).stdout == f"-1 {errno.ENOSYS}\n"
    foreign = "import ctypes\nprint(ctypes.CDLL(None).syscall(0x40000000 | 39))"  # getpid of the x32 architecture
    execution = run(foreign)
    if os.uname().machine == "x86_64":
        assert (execution.status, execution.exit_code, execution.stdout) == ("finished", -signal.SIGSYS, "")
    else:  # no such architecture: a call without a number
        assert execution.stdout == "-1\n"


HONEST = {
    "fork": "import os\npid = os.fork()\nprint(7) if pid == 0 else print(os.waitpid(pid, 0)[1])",
    "threads": """
        import threading
        answers = []
        threads = [threading.Thread(target=answers.append, args=(n,)) for n in range(4)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        print(sum(answers) + 1)""",
    "subprocess": """
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True, check=True).stdout)""",
    "processes": """
        import multiprocessing
        receive, send = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=send.send, args=(7,))
        process.start(), process.join(), print(receive.recv())""",
    "asyncio": "import asyncio\nprint(asyncio.run(asyncio.sleep(0.01, 7)))",
    "files": """
        import os, pathlib, sqlite3, tempfile
        base = sqlite3.connect("a.db"); base.execute("create table t (n)"); base.execute("insert into t values (7)")
        with tempfile.TemporaryDirectory() as folder: os.chmod(folder, 0o755); pathlib.Path(folder, "b").touch()
        print(base.execute("select n from t").fetchone()[0])""",
    "numpy": "import numpy\nprint(int(numpy.linalg.det(numpy.diag([1.0, 7.0])).round()))",
    "signals": """
        import signal
        signal.signal(signal.SIGALRM, lambda *_: print(7))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()""",
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass_the_filter(name):
    execution = LocalSandbox(SandboxLimits(timeout_s=60)).run(textwrap.dedent(HONEST[name]))
    assert execution.succeeded and "7" in execution.stdout.split(), execution


NETWORK = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_INET, ("192.0.2.1", 80)),
                        (socket.AF_UNIX, LOCAL)):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError as error:
        print(error.errno)
"""


def test_no_network(run):

    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("")  # the kernel chooses an abstract name that is free
        local.listen()
        execution = run(
            NETWORK.replace("PORT", str(server.getsockname()[1])).replace("LOCAL", repr(local.getsockname()))
        )
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
    secret.write_text("untouched", encoding="utf-8")
    execution = run(FILES.replace("OUTSIDE", repr(str(secret))))
    assert execution.stdout.splitlines() == ["[]", "False None ['main.py']"], execution
    assert secret.read_text(encoding="utf-8") == "untouched"


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
ctypes.CDLL(None).prctl(15, b"NAME")  # PR_SET_NAME, inherited by the children
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
    name = f"bomb {os.getpid()}"  # another run of this test may be going on
    execution = run(BOMB.replace("NAME", name))
    assert 1 <= int(execution.stdout) < LIMITS.max_processes
    assert name not in {process.info["name"] for process in psutil.process_iter(["name"])}


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


def test_memory_of_all_processes_together_is_limited():
    execution = LocalSandbox(LIMITS).run(HOARD)
    assert execution.status == "memory_limit" and not execution.succeeded


SHARED = """
import os, time
memory = bytearray(b"x") * (80 * 2**20)  # read during the end of a process, shares may add up to 2.5 times that
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
print([libc.shmget(0, ctypes.c_size_t(2**20), 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)])
"""


def test_memory_outside_of_address_spaces_is_limited(run):
    small = LocalSandbox(SandboxLimits(timeout_s=60, memory_mb=128, disk_mb=4))
    assert small.run(MEMORY_FILES).status == "memory_limit"
    assert run(SEGMENTS).stdout == "[-1, -1, -1]\n"


def test_output_limit(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    execution = run("while True: print('x' * 10000)")
    assert execution.status == "output_limit" and len(execution.stdout) < 2 * 2**20
    assert not os.listdir(tmp_path)  # the sandbox's folder is deleted
