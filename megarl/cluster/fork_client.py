"""Script that Ray runs in place of its own to set up a worker process; see :mod:`~megarl.cluster.fork_server`.

It hands its arguments, environment, working folder and standard streams to the fork server and ends. Without a server,
or for a worker with a runtime environment, it runs Ray's script. It imports nothing of megarl or Ray, since its start
is part of every worker's start.
"""

import json
import os
import socket
import sys

ADDRESS = "MEGARL_FORK_SERVER"
"""Environment variable: the socket of the fork server. Users may set it too, see :mod:`~megarl.cluster.fork_server`."""
HEADER_BYTES = 8

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def worker_arguments(arguments: list[str]) -> list[str] | None:
    """Remove the arguments that are for Ray's set-up script; None if the worker needs that script."""
    context, language, rest = {}, "PYTHON", []
    for argument in arguments:
        if argument.startswith(_CONTEXT):
            context = json.loads(argument.removeprefix(_CONTEXT) or "{}")
        elif argument.startswith(_LANGUAGE):
            language = argument.removeprefix(_LANGUAGE)
        else:
            rest.append(argument)
    own_python = context.pop("py_executable", None) in (None, sys.executable)
    plain = own_python and language == "PYTHON" and not any(context.values())
    return rest if plain and rest and rest[0].endswith(".py") else None


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


def setup_script(arguments: list[str]) -> str:
    """Return Ray's own set-up script, the neighbour of the worker's script."""
    worker = next(argument for argument in arguments if argument.endswith(".py"))
    return os.path.join(os.path.dirname(worker), "setup_worker.py")


if __name__ == "__main__":
    given = sys.argv[1:]
    forked = worker_arguments(given)
    if forked is None or not request_worker(os.environ.get(ADDRESS, ""), forked):
        os.execv(sys.executable, [sys.executable, setup_script(given), *given])
