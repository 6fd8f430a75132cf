"""A fork of the driver server behaves like a process of its own."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from support import warm_drivers
from support.warm_drivers import write_interpreter

from megarl.base.processes import wait_for_ends

SCRIPT = """
import atexit, json, os, signal, sys, threading
threads = threading.active_count()
threading.Thread(target=sys.stdout.write, args=["thread\\n"]).start()  # one write: another thread may write between two
atexit.register(print, "at exit")
sys.stdout.write(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "value": os.environ.get("VALUE"), "home": "HOME" in os.environ,
    "session": os.getsid(0) == os.getpid(), "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "threads": threads, "path": sys.path[0], "name": __name__, "loaded": "torch" in sys.modules,
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1], "stdin": sys.stdin.read(),
}) + "\\n")
print("to standard error", file=sys.stderr)
sys.exit(3)
"""


def test_a_fork_equals_a_process_of_its_own(drivers, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command, env = ["script.py", "a b", "c=1"], {"VALUE": "of the client"}
    fresh = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with (tmp_path / "output").open("w+", encoding="utf-8") as file:
        driver = drivers.start(command, tmp_path, env, file.fileno())
        assert driver.wait(60) == fresh.returncode == 3
        file.seek(0)
        forked = file.read()

    def facts(output):
        return json.loads(next(line for line in output.splitlines() if line.startswith("{")))

    of_fork, of_fresh = facts(forked), facts(fresh.stdout)
    assert of_fork.pop("loaded") and not of_fresh.pop("loaded")
    assert of_fork == of_fresh
    assert sorted(line for line in forked.splitlines() if line[0] != "{") == ["at exit", "thread", "to standard error"]


def test_signals_and_the_shells_client(drivers, tmp_path):
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)", encoding="utf-8")
    for number in (signal.SIGKILL, signal.SIGTERM):
        driver = drivers.start(["sleep.py"], tmp_path, dict(os.environ), 1)
        with pytest.raises(subprocess.TimeoutExpired):
            driver.wait(0.1)
        assert driver.poll() is None
        os.killpg(driver.pid, number)
        assert driver.wait(60) == -number == driver.poll()
    client = [sys.executable, "-S", warm_drivers.__file__, drivers.address, "megarl.cli", "trian"]
    done = subprocess.run(client, capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean train" in done.stderr


NAMED = "import os, sys, time; print(os.getpid(), sys.executable, flush=True); time.sleep(600)"


def test_a_job_of_the_warm_interpreter_ends_with_it(drivers, tmp_path):
    (tmp_path / "named.py").write_text(NAMED, encoding="utf-8")
    python = write_interpreter(tmp_path / "python", drivers.address)
    with subprocess.Popen([python, "named.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        number, interpreter = client.stdout.readline().split()
        assert int(number) != client.pid and interpreter == sys.executable
        job = psutil.Process(int(number))
        client.kill()
        assert wait_for_ends([job], 60) == []
    done = subprocess.run([python, "-c", "import sys; print('torch' in sys.modules)"], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
