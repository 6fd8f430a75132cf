"""The agent as a process, spoken to as the launcher does."""

import os
import queue
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from megarl.launch.protocol import ENDED, GONE, HELLO, OUTPUT, REFUSED, UP, Run, Stop, Token
from megarl.launch.remote import RemoteAgent

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.close(1); os.close(2)
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.fixture
def agent():
    events = queue.SimpleQueue()
    agent = RemoteAgent("here", [sys.executable, "-m", "megarl.launch.agent"], events)
    agent.events = events
    assert until(agent, HELLO).facts["addresses"]["lo"] == "127.0.0.1"
    yield agent
    assert agent.close(30)


def until(agent, kind, name=None):
    while True:
        event = agent.events.get(timeout=60)
        if event.kind == kind and name in (None, event.name):
            return event


def python(agent, code, name="x", **options):
    agent.send(Run(name, [sys.executable, "-c", code], **options))


def test_command_its_output_and_its_end(agent):
    code = "import os, sys; print('é' + os.environ['A']); print(2, file=sys.stderr); sys.exit(7)"
    python(agent, code, env={"A": "b"})
    said = {"stdout": "", "stderr": ""}
    while (event := agent.events.get(timeout=60)).kind == OUTPUT:
        said[event.facts["stream"]] += event.facts["text"]
    assert said == {"stdout": "éb\n", "stderr": "2\n"}
    assert (event.kind, event.facts["code"]) == (ENDED, 7)


def test_token_is_in_a_private_file(agent):
    agent.send(Token("secret"))
    code = "import os; f = os.environ['T']; print(f'{f} {open(f).read()} {os.stat(f).st_mode & 0o77}')"
    python(agent, code, env={"T": "{folder}/token"})
    file, token, mode = until(agent, OUTPUT).facts["text"].split()
    assert (token, mode) == ("secret", "0")
    agent.send(Stop())
    assert until(agent, GONE).facts["code"] == 0
    assert not os.path.exists(os.path.dirname(file))


@pytest.mark.parametrize("how", ["told", "unheard", "signalled"])
def test_all_that_was_started_ends_and_nothing_else(agent, how):
    """Also a process that left its session and has lost its parent."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    python(agent, DAEMON)
    daemon = psutil.Process(int(until(agent, OUTPUT).facts["text"]))
    if how == "told":
        agent.send(Stop())
    elif how == "unheard":
        agent._process.stdin.close()
    else:
        agent._process.send_signal(signal.SIGTERM)
    assert until(agent, GONE).facts["code"] == 0
    assert not daemon.is_running()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_command_ends_with_an_agent_that_is_killed(agent):
    python(agent, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    command = psutil.Process(int(until(agent, OUTPUT).facts["text"]))
    agent._process.kill()
    psutil.wait_procs([command], timeout=60)
    assert not command.is_running()


def test_port_that_is_taken_is_said_before_anything_starts(agent):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        python(agent, "print()", "second", ports=[port], address="127.0.0.1")
        assert f"port {port} of 127.0.0.1 is taken" in until(agent, REFUSED, "second").facts["why"]
    agent.send(Run("third", ["/nowhere/python"]))
    assert "/nowhere/python cannot be started" in until(agent, REFUSED, "third").facts["why"]


def test_server_is_told_when_it_listens(agent):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = f"import socket, time; time.sleep(0.5); s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    began = time.monotonic()
    python(agent, code, address="127.0.0.1", ports=[port], answers=port)
    until(agent, UP, "x")
    assert time.monotonic() - began >= 0.5


def test_other_ends_are_said_with_what_was_printed():
    events = queue.SimpleQueue()
    agent = RemoteAgent("far", ["sh", "-c", "echo no route to host >&2; exit 255"], events)
    gone = events.get(timeout=60)
    assert (gone.kind, gone.host, gone.facts) == (GONE, "far", {"code": 255, "why": "no route to host"})
    assert agent.close(10)
