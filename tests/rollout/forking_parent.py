"""A process that starts forks as SGLang starts its processes; prints what they see."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from megarl.base.child_process import die_with_parent
from megarl.rollout.sglang.forks import ForkedProcess, fork_this_process

VARIABLE = "FORK_OF_A_TEST"
LOADED = "module_of_the_parent"


def report(connection: Connection) -> None:
    """Send the environment, the parents and the handler of SGLang's signal; then fail as SGLang does."""
    parent = multiprocessing.parent_process()
    values = {
        "variable": os.environ.get(VARIABLE),
        "server": os.getppid(),
        "inherits": LOADED in sys.modules,
        "starter": parent and parent.pid,
        "default": signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL,
    }
    connection.send(values)
    os.kill(os.getppid(), signal.SIGQUIT)


def sleep(connection: Connection) -> None:
    """End with the parent only, as SGLang's processes."""
    die_with_parent(os.getppid())
    connection.send({"pid": os.getpid(), "server": os.getppid()})
    time.sleep(600)


def main() -> None:
    """Print the reports of forks, with ``own`` of a server that is a fork itself; or with ``sleep`` sleep with one."""
    sys.modules[LOADED] = sys
    if "own" in sys.argv:
        fork_this_process()
    signals: list[int] = []
    signal.signal(signal.SIGQUIT, lambda number, _: signals.append(number))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    if "sleep" in sys.argv:
        ForkedProcess(target=sleep, args=(sender,)).start()
        print(json.dumps(receiver.recv()), flush=True)
        time.sleep(600)
    reports = []
    for value in ("one", "two", None):
        os.environ.pop(VARIABLE, None)
        os.environ |= {VARIABLE: value} if value else {}
        process = ForkedProcess(target=report, args=(sender,))
        process.start()
        reports.append({**receiver.recv(), "is_starter": os.getpid()})
        process.join()
        assert process.exitcode == 0
        deadline = time.monotonic() + 60
        while not signals and time.monotonic() < deadline:
            time.sleep(0.01)
        reports[-1]["signals"] = signals.copy()
        signals.clear()
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
