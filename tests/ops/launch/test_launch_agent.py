"""The agent as a process, with requests and events."""

import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.base.ports import held_port
from megarl.base.processes import wait_for_ends
from megarl.ops.launch.protocol import (
    AGENT_STARTED,
    COMMAND_ENDED,
    DISCONNECTED,
    LISTENING,
    OUTPUT,
    PORTS_TAKEN,
    REQUEST_FAILED,
    SetToken,
    Shutdown,
    StartCommand,
    decode_event,
)
from megarl.ops.launch.remote import RemoteAgent

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
    agent = RemoteAgent("here", [sys.executable, "-m", "megarl.ops.launch.agent"], events)
    agent.events = events
    assert wait_for(agent, AGENT_STARTED).facts["addresses"]["lo"] == "127.0.0.1"
    yield agent
    assert agent.close(60)


def wait_for(agent, kind, name=None):
    while True:
        event = agent.events.get(timeout=180)
        if event.kind == kind and name in (None, event.name):
            return event


def python(agent, code, name="x", **options):
    agent.send(StartCommand(name, [sys.executable, "-c", code], **options))


def test_command_output_and_exit_code(agent):
    code = "import os, sys; print('é' + os.environ['A']); print(2, file=sys.stderr); sys.exit(7)"
    python(agent, code, env={"A": "b"})
    output = {"stdout": "", "stderr": ""}
    while (event := agent.events.get(timeout=180)).kind == OUTPUT:
        output[event.facts["stream"]] += event.facts["text"]
    assert output == {"stdout": "éb\n", "stderr": "2\n"}
    assert (event.kind, event.facts["code"]) == (COMMAND_ENDED, 7)


def test_token_is_stored_in_a_private_file(agent):
    agent.send(SetToken("secret"))
    code = "import os; f = os.environ['T']; print(f'{f} {open(f).read()} {os.stat(f).st_mode & 0o77}')"
    python(agent, code, env={"T": "{folder}/token"})
    file, token, mode = wait_for(agent, OUTPUT).facts["text"].split()
    assert (token, mode) == ("secret", "0")
    agent.send(Shutdown())
    assert wait_for(agent, DISCONNECTED).facts["code"] == 0
    assert not Path(file).parent.exists()


@pytest.mark.parametrize("cause", ["shutdown", "end of input", "signal"])
def test_agent_ends_its_descendants_and_no_other_process(agent, cause):
    """Includes a daemon in a new session whose parent has died."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    python(agent, DAEMON)
    daemon = psutil.Process(int(wait_for(agent, OUTPUT).facts["text"]))
    if cause == "shutdown":
        agent.send(Shutdown())
    elif cause == "end of input":
        agent._process.stdin.close()
    else:
        agent._process.send_signal(signal.SIGTERM)
    assert wait_for(agent, DISCONNECTED).facts["code"] == 0
    assert not daemon.is_running()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_command_ends_if_its_agent_is_killed(agent):
    python(agent, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    command = psutil.Process(int(wait_for(agent, OUTPUT).facts["text"]))
    agent._process.kill()
    wait_for_ends([command], 60)
    assert not command.is_running()


def test_used_port_is_reported_before_the_command_starts(agent):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        python(agent, "print()", "second", ports=[port], address="127.0.0.1")
        assert f"port {port} of 127.0.0.1 is taken" in wait_for(agent, PORTS_TAKEN, "second").facts["reason"]
    agent.send(StartCommand("third", ["/nowhere/python"]))
    assert "/nowhere/python cannot be started" in wait_for(agent, REQUEST_FAILED, "third").facts["reason"]


MALFORMED = [
    "no JSON",
    "[" * 100_000,
    *("5", "null", "[]", "{}", '"text"', '{"do": []}', '{"do": "Nothing"}', '{"do": "Heartbeat", "more": 1}'),
    *(f'{{"do": "StartCommand", "name": "x", "argv": {value}}}' for value in ("5", "null", '"ls"', "[5]", "[]", "{}")),
    *(
        f'{{"do": "StartCommand", "name": "x", "argv": ["true"], "address": "127.0.0.1", {fields}}}'
        for fields in (
            *('"env": []', '"env": {"A": 5}', '"env": {"A": "\\u0000"}', '"env": {"A=": "b", "": "c"}', '"ports": 5'),
            *('"ports": ["a"]', '"ports": [70000]', '"ports": [true]', '"listen_port": "80"', '"listen_port": 1.5'),
        )
    ),
    '{"do": "StartCommand", "name": [], "argv": ["true"]}',
    '{"do": "StartCommand", "name": "x", "argv": ["a\\u0000b"]}',
    *(f'{{"do": "SendSignal", "name": "sleep", "number": {value}}}' for value in ("1000", "-5", '"9"', "null")),
    *(f'{{"do": "SetToken", "token": {value}}}' for value in ("5", "null", '"\\ud800"')),
    *(f'{{"do": "Shutdown", "keep_logs": {value}}}' for value in ("5", "null", "[]")),
    "\udcff",
]


def test_a_malformed_request_ends_nothing(agent):
    """Each is answered by one event; the command goes on."""
    python(agent, "import sys, time; print('up', end='', flush=True); time.sleep(600)", "sleep")
    wait_for(agent, OUTPUT, "sleep")
    for line in MALFORMED:
        agent._process.stdin.buffer.write(f"{line}\n".encode(errors="surrogateescape"))
        agent._process.stdin.buffer.flush()
        event = agent.events.get(timeout=180)
        assert event.kind == REQUEST_FAILED, (line, event)
    python(agent, "print('fine', end='')")
    assert wait_for(agent, OUTPUT, "x").facts["text"] == "fine"


def test_a_malformed_event_is_other_output():
    for text in ("5", "[]", "{}", '{"kind": 5}', '{"kind": "output", "facts": []}', '{"kind": "output", "name": null}'):
        assert decode_event(f"megarl-event {text}\n", "here") is None
    assert decode_event('megarl-event {"kind": "output", "facts": {"text": "a"}}', "here").facts == {"text": "a"}


def test_listening_server_is_reported(agent):
    with held_port("127.0.0.1") as port:
        code = f"import socket, time; time.sleep(0.5); s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
        began = time.monotonic()
        python(agent, code, address="127.0.0.1", ports=[port], listen_port=port)
        wait_for(agent, LISTENING, "x")
        assert time.monotonic() - began >= 0.5


def test_disconnect_is_reported_with_the_last_output():
    events = queue.SimpleQueue()
    agent = RemoteAgent("far", ["sh", "-c", "echo no route to host >&2; exit 255"], events)
    event = events.get(timeout=180)
    assert (event.kind, event.host, event.facts) == (DISCONNECTED, "far", {"code": 255, "reason": "no route to host"})
    assert agent.close(60)
