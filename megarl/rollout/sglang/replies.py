"""The way back from SGLang's ranks to the engine.

SGLang tells nobody what a custom weight loader found, and ends when it raises. So each rank connects to the engine and
answers there. Connections are authenticated by a key that travels with the order.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

from megarl.errors import WeightSyncError


@dataclass(frozen=True)
class Reply:
    """What a rank answers.

    Attributes:
        facts: can be written as JSON.
        data: bytes of a tensor.
        error: why the order was not carried out; empty if it was.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""
    error: str = ""


def send_reply(to: Mapping[str, Any], ticket: int, rank: int, reply: Reply) -> None:
    """Called in a rank: answers an order.

    Args:
        to: address and key, from :attr:`Replies.to`.
        ticket: of the order.
        rank: this one.
        reply: the answer.
    """
    head = {"ticket": ticket, "rank": rank, "facts": dict(reply.facts), "error": reply.error}
    try:
        with Client(_address(to["address"]), authkey=bytes.fromhex(to["key"])) as connection:
            connection.send_bytes(json.dumps(head).encode())
            connection.send_bytes(reply.data)
    except (OSError, EOFError, AuthenticationError):
        # The engine is gone or cannot be reached. It will miss the answer; SGLang must not end because of it.
        return


class Replies:
    """Hears the ranks' answers in a thread.

    Args:
        ranks_host: another host, of some of the ranks; None: they all run on this one.
    """

    def __init__(self, ranks_host: str | None = None) -> None:
        key = secrets.token_bytes(32)
        self._listener = Listener(("127.0.0.1" if ranks_host is None else "0.0.0.0", 0), backlog=64, authkey=key)
        host = "127.0.0.1" if ranks_host is None else own_address(ranks_host)
        self.to = {"address": [host, self._listener.address[1]], "key": key.hex()}
        self._heard: queue.SimpleQueue[tuple[int, int, Reply]] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._listen, daemon=True, name="sglang-replies").start()

    def collect(self, ticket: int, ranks: set[int], timeout_s: float) -> dict[int, Reply]:
        """The answers of some ranks to an order.

        Raises:
            WeightSyncError: a rank answered with an error, or not in time.
        """
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout_s
        while set(replies) != ranks:
            try:
                of, rank, reply = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                silent = sorted(ranks - set(replies))
                raise WeightSyncError(
                    f"SGLang's ranks {silent} did not answer at {self.to['address']} within {timeout_s:g} s"
                ) from None
            if of == ticket:
                replies[rank] = reply
        for rank, reply in sorted(replies.items()):
            if reply.error:
                raise WeightSyncError(f"SGLang's rank {rank}: {reply.error}")
        return replies

    def close(self) -> None:
        """Stops listening."""
        if not self._closed:
            self._closed = True
            # A last connection, without which the thread would wait for one.
            send_reply(self.to, -1, -1, Reply())
            self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                with self._listener.accept() as connection:
                    head = json.loads(connection.recv_bytes())
                    reply = Reply(head["facts"], connection.recv_bytes(), head["error"])
            except (OSError, EOFError, AuthenticationError, ValueError, KeyError):
                # A stranger, or a rank that ended; who waits for it will miss it.
                continue
            self._heard.put((head["ticket"], head["rank"], reply))


def _address(address: Any) -> tuple[str, int]:
    return address[0], address[1]


def own_address(other: str) -> str:
    """The address by which another host reaches this one: of the interface that leads there, or what the environment
    variable ``MEGARL_HOST_ADDRESS`` says.
    """
    named = os.environ.get("MEGARL_HOST_ADDRESS")
    if named:
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing; any port will do
        return str(probe.getsockname()[0])
