"""Script that stands in for the two agents of a node of Ray, in a local Ray without dashboard.

Every node starts both agents, waits for files with their ports, and ends if one of them does. Each imports Ray: about
a second of CPU time per run, and 100 MB. The dashboard's agent has nothing to serve without a dashboard: this script
tells the node so, as the agent itself does without the dashboard's packages. The other agent sets up runtime
environments, which few runs have: this script listens at its port, and becomes the agent with the first request.

Before that it imports nothing of megarl or Ray. It ends with the node, which holds the other end of its standard input.

Usage: ``node_agents.py dashboard SESSION_FOLDER NODE_ID`` or ``node_agents.py runtime_env PROGRAM ARGUMENT...``, the
latter with the command line of Ray's agent.
"""

import os
import runpy
import select
import socket
import sys

DASHBOARD, RUNTIME_ENV, _BECOME = "dashboard", "runtime_env", "become"
_DASHBOARD_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_RUNTIME_ENV_PORT = "runtime_env_agent_port"
_NO_SERVICE = -1
_BACKLOG = 128


def options_of(command: list[str]) -> dict[str, str]:
    """Return the options of the form ``--name=value`` in a command line."""
    return dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)


def announce(session: str, node: str, name: str, port: int) -> None:
    """Write the file with a port, at once, since the node reads it while it waits."""
    path = os.path.join(session, f"{name}_{node}")
    with open(f"{path}.draft", "w", encoding="utf-8") as file:
        file.write(str(port))
    os.rename(f"{path}.draft", path)


def listen_for_agent(command: list[str]) -> None:
    """Listen in place of the agent of runtime environments; with the first request, replace this process by it."""
    given = options_of(command)
    family, kind, protocol, _, place = socket.getaddrinfo(given["node-ip-address"], 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(place)
        listener.listen(_BACKLOG)
        announce(given["session-dir"], given["node-id"], _RUNTIME_ENV_PORT, listener.getsockname()[1])
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener in ready:  # the request is not accepted here: the agent does
            listener.set_inheritable(True)
            os.execv(sys.executable, [sys.executable, __file__, _BECOME, str(listener.fileno()), *command])


def become_agent(descriptor: int, command: list[str]) -> None:
    """Run Ray's agent of runtime environments, listening at an open socket instead of one of its own."""
    program = command[0]
    sys.path[0] = os.path.dirname(program)
    sys.path.insert(0, os.path.join(sys.path[0], "thirdparty_files"))  # Ray has an aiohttp of its own
    from aiohttp import web

    listener, run_app = socket.socket(fileno=descriptor), web.run_app

    def run_at_listener(app: web.Application, *, sock: socket.socket, **options: object) -> None:
        sock.close()
        run_app(app, sock=listener, **options)

    web.run_app = run_at_listener
    sys.argv = command
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == DASHBOARD:
        for port_name in _DASHBOARD_PORTS:
            announce(words[0], words[1], port_name, _NO_SERVICE)
        sys.stdin.buffer.read()
    elif role == RUNTIME_ENV:
        listen_for_agent(words)
    else:
        become_agent(int(words[0]), words[1:])
