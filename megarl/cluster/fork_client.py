"""Script that Ray runs instead of ``python`` to get a worker process from a :mod:`~megarl.cluster.fork_server`.

It hands its arguments, environment, working folder and standard streams to the server and ends. It imports nothing of
megarl, since its start is part of every worker's start.
"""

import json
import os
import socket
import sys

HEADER_BYTES = 8


def request_worker(address: str, arguments: list[str]) -> bool:
    """Ask the server to fork a process that runs ``arguments`` as a Python script; False if it did not."""
    body = json.dumps({"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address)
            socket.send_fds(connection, [len(body).to_bytes(HEADER_BYTES, "big")], [0, 1, 2])
            connection.sendall(body)
            return bool(connection.recv(1))
        except OSError:
            return False


if __name__ == "__main__" and not request_worker(sys.argv[1], sys.argv[2:]):
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])  # without the server the worker starts by itself
