"""Starts a Python program of Ray: as a fork, as a light stand-in, not at all, or as Ray does.

Ray starts workers, agents and helpers by ``sys.executable PROGRAM ARGUMENT...``. While a local Ray or a node of a
launched CPU cluster starts, ``sys.executable`` is a shell script that runs this program, see
:func:`~megarl.cluster.local_ray.light_programs`. It knows Ray's programs by the names of their files and by their
arguments. It starts a program that it does not know, as of another version of Ray, as Ray would.

- A worker is a fork of the fork server, see :mod:`~megarl.cluster.fork_server`. One with a runtime environment is a new
  process: Ray starts it by another program.
- A node starts two agents, waits for files with their ports, and ends if one of them does. Each imports Ray: about a
  second of CPU time, and 100 MB. The dashboard's agent has nothing to serve without a dashboard: this program tells the
  node so, as the agent itself does without the dashboard's packages. The other agent sets up runtime environments,
  which few runs have: this program listens at its port, and becomes the agent with the first request. Both end with the
  node, which holds the other end of their standard input.
- Autoscaler, log monitor and API server have nothing to do in a local Ray without dashboard.

It imports nothing of megarl or Ray, since its start is part of every worker's start.

Usage: ``ray_programs.py SERVICE,... ARGUMENT...``: names of :data:`SERVICES` to do without, then the arguments of the
interpreter.
"""

import json
import os
import runpy
import select
import socket
import sys

ADDRESS = "MEGARL_FORK_SERVER"
"""Environment variable: the socket of the fork server. Users may set it too, see :mod:`~megarl.cluster.fork_server`."""
HEADER_BYTES = 8

WORKER = "default_worker.py"
DASHBOARD_AGENT, RUNTIME_ENV_AGENT = "dashboard/agent.py", "runtime_env/agent/main.py"
SERVICES = {
    "autoscaler": ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py"),
    "dashboard": ("dashboard/dashboard.py", DASHBOARD_AGENT, RUNTIME_ENV_AGENT),
    "log-monitor": ("_private/log_monitor.py",),
}
"""Services that a local Ray can do without: the ends of the paths of their programs."""

_AGENT_PORTS = {DASHBOARD_AGENT: "grpc-port", RUNTIME_ENV_AGENT: "runtime-env-agent-port"}
_DASHBOARD_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_RUNTIME_ENV_PORT = "runtime_env_agent_port"
_NO_SERVICE = -1
_BACKLOG = 128
_BECOME = "become"


def request_worker(address: str, arguments: list[str]) -> bool:
    """Ask the server to fork a process that runs ``arguments`` as a Python script; False if it did not."""
    request: dict[str, object] = {"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address)
            send_request(connection, request, [0, 1, 2])
            return bool(connection.recv(1))
        except OSError:
            return False


def send_request(connection: socket.socket, request: dict[str, object], descriptors: list[int]) -> None:
    """Send a request and its file descriptors, first the three standard streams."""
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(HEADER_BYTES, "big")], descriptors)
    connection.sendall(body)


def agent_options(agent: str, command: list[str]) -> dict[str, str] | None:
    """Return the options of an agent's command line; None for an older Ray, which gives its agents their ports."""
    options = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
    waits = {"session-dir", "node-id", "node-ip-address"} <= options.keys() and options.get(_AGENT_PORTS[agent]) == "0"
    return options if waits else None


def announce(options: dict[str, str], name: str, port: int) -> None:
    """Write the file with a port, at once, since the node reads it while it waits."""
    path = os.path.join(options["session-dir"], f"{name}_{options['node-id']}")
    with open(f"{path}.draft", "w", encoding="utf-8") as file:
        file.write(str(port))
    os.rename(f"{path}.draft", path)


def listen_for_agent(options: dict[str, str], command: list[str]) -> None:
    """Listen in place of the runtime environment agent; with the first request, replace this process by it."""
    family, kind, protocol, _, place = socket.getaddrinfo(options["node-ip-address"], 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(place)
        listener.listen(_BACKLOG)
        announce(options, _RUNTIME_ENV_PORT, listener.getsockname()[1])
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener in ready:  # the request is not accepted here: the agent does
            listener.set_inheritable(True)
            os.execv(sys.executable, [sys.executable, __file__, _BECOME, str(listener.fileno()), *command])


def become_agent(descriptor: int, command: list[str]) -> None:
    """Run Ray's runtime environment agent, listening at an open socket instead of its own."""
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


def start(without: list[str], arguments: list[str]) -> None:
    """Start a program, given the arguments of the interpreter; return if nothing is left to do in its place."""
    first = next((number for number, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
    command = arguments[first:]
    programs = [name for service in without for name in SERVICES.get(service, ())]
    name = next((name for name in programs if command and command[0].endswith(f"/{name}")), None)
    if name not in (None, *_AGENT_PORTS):
        return
    options = None if name is None else agent_options(name, command)
    if options is not None and name == RUNTIME_ENV_AGENT:
        listen_for_agent(options, command)
    elif options is not None:
        for port_name in _DASHBOARD_PORTS:
            announce(options, port_name, _NO_SERVICE)
        sys.stdin.buffer.read()
    elif not (command and command[0].endswith(f"/{WORKER}") and request_worker(os.environ.get(ADDRESS, ""), command)):
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    if sys.argv[1] == _BECOME:
        become_agent(int(sys.argv[2]), sys.argv[3:])
    else:
        start(sys.argv[1].split(","), sys.argv[2:])
