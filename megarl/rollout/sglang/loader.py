"""The weight loader inside each of SGLang's ranks, and the channel for its replies to the engine.

SGLang calls :func:`load` with the model and a list of (name, tensor) for ``update_weights_from_tensor``. The name is a
command in JSON, the tensor its data. SGLang does not report errors of a custom loader, and an exception would end the
server. So the loader never raises: each rank connects to the engine and replies to each command, with an error if
needed. Connections are authenticated with a key that the command contains.
"""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.base.ports import interface_of
from megarl.models.checksum import ParamRectangle, tensor_checksum
from megarl.rollout.weight_checks import Coverage, check_complete

ALIGNMENT = 16
"""Alignment in bytes of slices in a buffer, required for views of any dtype."""


@dataclass(frozen=True)
class Reply:
    """A rank's reply to a command.

    Attributes:
        values: values that JSON can encode.
        data: bytes of a tensor.
        error: reason of a failure; empty on success.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""
    error: str = ""


def send_reply(to: Mapping[str, Any], command_id: int, rank: int, reply: Reply) -> None:
    """Send the reply to a command; called in a rank.

    Args:
        to: address and key, from :attr:`ReplyListener.to`.
        command_id: number of the command.
        rank: this rank.
        reply: the reply.
    """
    head = {"command_id": command_id, "rank": rank, "values": dict(reply.values), "error": reply.error}
    try:
        with Client(_address(to["address"]), authkey=bytes.fromhex(to["key"])) as connection:
            connection.send_bytes(json.dumps(head).encode())
            connection.send_bytes(reply.data)
    except (OSError, EOFError, AuthenticationError):
        # The engine is lost or unreachable and will miss the reply. SGLang must keep running.
        return


class ReplyListener:
    """Receives the ranks' replies in a thread of the engine's process.

    Args:
        ranks_host: another host that runs some of the ranks; None = all ranks run on this host.
    """

    def __init__(self, ranks_host: str | None = None) -> None:
        key = secrets.token_bytes(32)
        address, listens_at = ("127.0.0.1",) * 2 if ranks_host is None else reply_addresses(ranks_host)
        self._listener = Listener((listens_at, 0), backlog=64, authkey=key)
        self.to = {"address": [address, self._listener.address[1]], "key": key.hex()}
        self._received: queue.SimpleQueue[tuple[int, int, Reply]] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._listen, daemon=True, name="sglang-replies").start()

    def collect(self, command_id: int, ranks: set[int], timeout_s: float) -> dict[int, Reply]:
        """Return the replies of some ranks to a command.

        Raises:
            WeightSyncError: a rank replied with an error, or not in time.
        """
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout_s
        while set(replies) != ranks:
            try:
                replied_id, rank, reply = self._received.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                silent = sorted(ranks - set(replies))
                raise WeightSyncError(
                    f"SGLang's ranks {silent} did not reply at {self.to['address']} within {timeout_s:g} s"
                ) from None
            if replied_id == command_id:
                replies[rank] = reply
        for rank, reply in sorted(replies.items()):
            if reply.error:
                raise WeightSyncError(f"SGLang's rank {rank}: {reply.error}")
        return replies

    def close(self) -> None:
        """Stop listening."""
        if not self._closed:
            self._closed = True
            # A last connection wakes the thread.
            send_reply({**self.to, "address": self._listener.address}, -1, -1, Reply())
            self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                with self._listener.accept() as connection:
                    head = json.loads(connection.recv_bytes())
                    reply = Reply(head["values"], connection.recv_bytes(), head["error"])
            except (OSError, EOFError, AuthenticationError, ValueError, KeyError):
                # An unknown client or an ended rank; the engine's wait for it times out.
                continue
            self._received.put((head["command_id"], head["rank"], reply))


def _address(address: Any) -> tuple[str, int]:
    return address[0], address[1]


def reply_addresses(host: str) -> tuple[str, str]:
    """Return the address at which ``host`` reaches this one, and the address to listen at.

    Both are the address of the interface towards that host, or ``MEGARL_HOST_ADDRESS``, an environment variable. If
    that is no address of this machine, such as behind address translation, the listener stays at the interface.
    """
    named = os.environ.get("MEGARL_HOST_ADDRESS")
    if named and interface_of(named):
        return named, named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; any port will do
        local = str(probe.getsockname()[0])
    return named or local, local


class RankLoader:
    """Writes weight updates into one rank's parameters, and reads them for verification."""

    def __init__(self) -> None:
        self._covers: dict[str, Coverage] | None = None
        self._version = 0

    def begin(self, model: torch.nn.Module, command: dict[str, Any], data: Tensor) -> Reply:
        """Begin an update: compare the model's parameters with the expected ones."""
        self._covers = None
        held, expected = dict(model.named_parameters()), command["params"]
        for name, (shape, _) in expected.items():
            if name not in held:
                raise WeightSyncError(f"SGLang has no parameter '{name}'")
            if list(held[name].shape) != shape:
                raise WeightSyncError(f"SGLang holds '{name}' with shape {list(held[name].shape)}, expected {shape}")
        extra = sorted(set(held) - set(expected))
        if extra:
            raise WeightSyncError(f"SGLang has a parameter '{extra[0]}' without weights in the update")
        for name, (_, live) in expected.items():
            held[name].data[live[0] :].zero_()
        self._version = command["version"]
        self._covers = {name: Coverage(name, tuple(live)) for name, (_, live) in expected.items() if math.prod(live)}
        return Reply()

    def write(self, model: torch.nn.Module, command: dict[str, Any], data: Tensor) -> Reply:
        """Write slices, after checking all of them."""
        if self._covers is None:
            raise WeightSyncError("no weight update is open in SGLang's rank")
        covers, self._covers = self._covers, None
        for name, start, shape, *_ in command["slices"]:
            if name not in covers:
                raise WeightSyncError(f"'{name}' is not a parameter that this update writes")
            covers[name].add(start, shape)
        held = dict(model.named_parameters())
        for name, start, shape, dtype, offset in command["slices"]:
            kind = getattr(torch, dtype)
            values = data[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)
            held[name].data[_box(start, shape)].copy_(values)
        _wait(data)
        self._covers = covers
        return Reply()

    def end(self, model: torch.nn.Module, command: dict[str, Any], data: Tensor) -> Reply:
        """End the update if every element was written."""
        if self._covers is None:
            raise WeightSyncError("no weight update is open in SGLang's rank")
        covers, self._covers = self._covers, None
        if command["version"] != self._version:
            raise WeightSyncError(f"update to weight version {self._version} was ended as version {command['version']}")
        check_complete(covers.values(), self._version)
        derive = getattr(model, "post_load_weights", None)
        if derive is not None:
            derive()
        return Reply()

    def checksum(self, model: torch.nn.Module, command: dict[str, Any], data: Tensor) -> Reply:
        """Return digests of rows of parameters, under the engine's keys."""
        held = dict(model.named_parameters())
        return Reply(
            {
                key: tensor_checksum(held[name].data[first:][:rows])
                for key, (name, first, rows) in command["rows"].items()
            }
        )

    def sums(self, model: torch.nn.Module, command: dict[str, Any], data: Tensor) -> Reply:
        """Return checksums of parts of parameters, computed on this rank's device."""
        held = dict(model.named_parameters())
        rectangles = [ParamRectangle(*fields) for fields in command["rectangles"]]
        return Reply({"checksums": [rectangle.checksum(held[rectangle.name].data) for rectangle in rectangles]})

    def read(self, model: torch.nn.Module, command: dict[str, Any], data: Tensor) -> Reply:
        """Return rows of one parameter."""
        tensor = dict(model.named_parameters())[command["name"]].data[
            command["first"] : command["first"] + command["rows"]
        ]
        tensor = tensor.cpu().contiguous()
        values = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        return Reply(values, tensor.flatten().view(torch.uint8).numpy().tobytes())


_LOADER = RankLoader()


_ACTIONS = {
    "begin": _LOADER.begin,
    "write": _LOADER.write,
    "end": _LOADER.end,
    "checksum": _LOADER.checksum,
    "sums": _LOADER.sums,
    "read": _LOADER.read,
}


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Run commands; see the module docstring.

    Args:
        model: SGLang's model in this rank.
        named_tensors: commands with their data; a command may name a file with its data instead.
    """
    for text, data in named_tensors:
        command = json.loads(text)
        try:
            with torch.no_grad():
                reply = _ACTIONS[command["action"]](model, command, _data_of(command, data))
        except Exception as error:
            reply = Reply(
                error=f"{error}" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
            )
        send_reply(command["to"], command["command_id"], command["rank"], reply)


def _data_of(command: dict[str, Any], data: Tensor) -> Tensor:
    path = command.get("file")
    if path is None:
        return data
    return torch.from_file(path, shared=True, size=command["bytes"], dtype=torch.uint8)


def _box(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def _wait(data: Tensor) -> None:
    """Wait until nothing reads the sender's memory any more."""
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
