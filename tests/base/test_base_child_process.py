import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.waits import wait_for_end

from megarl.base.child_process import (
    ChildProcess,
    describe_exit,
    die_with_parent,
    kill_process_tree,
    open_connection,
)
from megarl.base.processes import child_processes


def echo_child(handle, prefix, seconds=0.0):
    """Reply to each message; ``exit`` ends the process, ``spawn`` starts a grandchild in a new session."""
    with open_connection(handle) as connection:
        while True:
            message = connection.recv()
            if message == "exit":
                os._exit(3)
            if message == "spawn":
                code = "import time; time.sleep(600)"
                grandchild = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
                message = grandchild.pid
            time.sleep(seconds)
            connection.send((prefix, message))


def parent_of_a_child(handle):
    """Starts a process that dies with this one, sends its pid, and kills itself."""
    with open_connection(handle) as connection:
        child = ChildProcess(f"{__name__}:child_of_parent", os.getpid())
        assert child.request("ready?", 60) == "ready"
        connection.send(child.pid)
        connection.recv()
        os.kill(os.getpid(), signal.SIGKILL)


def child_of_parent(handle, parent):
    die_with_parent(parent)
    with open_connection(handle) as connection:
        connection.recv()
        connection.send("ready")
        time.sleep(600)


def start(*arguments):
    return ChildProcess(f"{__name__}:echo_child", *arguments)


def test_requests_are_answered_in_order():
    child = start("reply")
    try:
        assert child.request({"a": 1}, 60) == ("reply", {"a": 1})
        assert child.request([2], 60) == ("reply", [2])
        assert not child.is_dead()
    finally:
        assert child.kill() == "was killed"
    assert child.is_dead()


def test_a_request_has_a_deadline_and_an_ended_process_is_an_error():
    child = start("reply", 30.0)
    try:
        with pytest.raises(TimeoutError, match=r"no reply within 0 s"):
            child.request("slow", 0.2)
    finally:
        child.kill()
    child = start("reply")
    with pytest.raises(EOFError, match=r"its process ended \(3\)"):
        child.request("exit", 60)
    assert child.kill(5.0) == "ended with status 3"


def test_descendants_in_sessions_of_their_own_are_killed():
    child = start("reply")
    _, grandchild = child.request("spawn", 60)
    child.kill()
    wait_for_end(grandchild)


def test_the_process_tree_of_a_command_is_killed():
    process = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600; true"])
    while not (children := child_processes(psutil.Process(process.pid))):
        time.sleep(0.01)
    kill_process_tree(process, 30.0)
    assert process.returncode == -signal.SIGKILL
    for child in children:
        wait_for_end(child.pid)
    kill_process_tree(process)


def test_a_child_dies_with_its_parent():
    parent = ChildProcess(f"{__name__}:parent_of_a_child")
    pid = parent.connection.recv()
    parent.connection.send("die")
    wait_for_end(pid)
    assert parent.kill(5.0) == "died of SIGKILL"


def test_exit_statuses_are_described():
    assert describe_exit(-signal.SIGTERM) == "died of SIGTERM" and describe_exit(2) == "ended with status 2"
