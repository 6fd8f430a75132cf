"""The weight loader inside each of SGLang's ranks, and the channel of its commands from the engine.

SGLang calls :func:`load` with the model and a list of (name, tensor) for ``update_weights_from_tensor``. The name is
the address of the engine, in JSON. The rank connects to it, and runs and answers its commands until the engine hangs
up. So the buckets of an update do not pass SGLang's front end and scheduler, and no rank waits for another one between
them. Weights are not among the commands, except with the transport ``inline``: the rank's
:class:`~megarl.sharding.receiver.BucketReceiver` reads them from the training ranks.

SGLang does not report errors of a custom loader, and an exception would end the server. So the loader never raises: it
replies with an error. Both ends prove to each other that they have the key of the call, since a rank unpickles the
commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge, wait
from typing import Any

import torch
from torch import Tensor

from megarl.base.child_process import environment_variables
from megarl.base.errors import WeightSyncError
from megarl.base.ports import interface_of
from megarl.models.checksum import ParamRectangle, tensor_checksum
from megarl.rollout.interface import NOT_CONNECTED
from megarl.rollout.quantization import IncomingMatrices
from megarl.rollout.sglang.backend import CallWatch
from megarl.rollout.sglang.options import GLOO_INTERFACE
from megarl.rollout.sglang.shards import ALWAYS_FLOAT32, SGLangShard
from megarl.rollout.weight_checks import ShardWeights
from megarl.sharding.placement import current_location
from megarl.sharding.receiver import BucketReceiver, ReceiverSpec
from megarl.sharding.sender import Message

LOST = (OSError, EOFError, AuthenticationError)
"""Errors of a connection whose other end is gone, or is not the expected one."""

LOOK_S = 0.2
"""Seconds between checks that SGLang's call has not ended, while its ranks connect."""


@dataclass(frozen=True)
class Reply:
    """A rank's reply to a command.

    Attributes:
        values: values that JSON can encode.
        data: bytes of a tensor.
        error: reason of a failure; empty on success.
        code: its code, see :class:`~megarl.base.errors.MegarlError`.
    """

    values: Any = None
    data: bytes = b""
    error: str = ""
    code: str = ""


class CommandChannel:
    """The engine's connections to its ranks, which last as long as a call of the loader.

    Args:
        ranks_host: another host that runs some of the ranks; None = all ranks run on this host.
        send_timeout_s: seconds after which a rank counts as lost that reads nothing of its command.
    """

    def __init__(self, ranks_host: str | None = None, send_timeout_s: float = 180.0) -> None:
        self._key, self._send_timeout_s = secrets.token_bytes(32), send_timeout_s
        address, listens_at = ("127.0.0.1",) * 2 if ranks_host is None else channel_addresses(ranks_host)
        self._listener = Listener((listens_at, 0), backlog=64)  # each connection proves the key in its own thread
        self.to = {"address": [address, self._listener.address[1]], "key": self._key.hex()}
        self._changed = threading.Condition()  # guards the next three
        self._call_id = 0
        self._connected: dict[int, Connection] = {}
        self._ranks: list[Connection] = []
        self._closed = False
        threading.Thread(target=self._listen, daemon=True, name="sglang-ranks").start()

    @property
    def is_open(self) -> bool:
        """Whether the ranks listen to commands."""
        return bool(self._ranks)

    def invite(self, ranks: int) -> list[bytes]:
        """Return the arguments of a call of the loader, by rank; with them the ranks connect."""
        self.hang_up()
        calls = [{**self.to, "call_id": self._call_id, "rank": rank} for rank in range(ranks)]
        return [pickle.dumps([(json.dumps(call), torch.empty(0, dtype=torch.uint8))]) for call in calls]

    def accept(self, ranks: int, check: Callable[[], None]) -> None:
        """Wait until all ranks of the last :meth:`invite` have connected.

        Args:
            ranks: number of ranks.
            check: called again and again; raises if no rank will connect any more.
        """
        with self._changed:
            while len(self._connected) < ranks:
                check()
                self._changed.wait(LOOK_S)
            self._ranks = [self._connected[rank] for rank in range(ranks)]

    def exchange(self, commands: Sequence[bytes], watch: CallWatch) -> list[Reply]:
        """Send every rank its command and return the replies, by rank.

        Args:
            commands: pickled action and arguments, by rank.
            watch: ends the wait for a rank that will not reply.

        Raises:
            EOFError: a rank is gone.
            OSError: the same, or it did not read its command for ``send_timeout_s``.
            EngineLost: see :meth:`CallWatch.check`.
        """
        for connection, command in zip(self._ranks, commands, strict=True):
            connection.send_bytes(command)
        replies: dict[int, Reply] = {}
        while len(replies) < len(self._ranks):
            silent = [connection for rank, connection in enumerate(self._ranks) if rank not in replies]
            ready = wait(silent, watch.pause_s)
            for rank, connection in enumerate(self._ranks):
                if connection in ready:
                    head = json.loads(connection.recv_bytes())
                    replies[rank] = Reply(head["values"], connection.recv_bytes(), head["error"], head["code"])
            if not ready:
                watch.check()
        return [replies[rank] for rank in range(len(self._ranks))]

    def hang_up(self) -> None:
        """Close the connections; the ranks return to SGLang."""
        with self._changed:
            connected, self._connected, self._ranks = self._connected, {}, []
            self._call_id += 1  # ranks that connect later are sent away
        for connection in connected.values():
            connection.close()

    def close(self) -> None:
        """Hang up and stop listening."""
        self.hang_up()
        if not self._closed:
            self._closed = True
            # A last connection wakes the thread. It sends nothing: a thread that has ended meanwhile answers nothing.
            with contextlib.suppress(OSError), socket.create_connection(self._listener.address[:2]):
                pass
            self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            with contextlib.suppress(*LOST):
                connection = self._listener.accept()
                threading.Thread(target=self._admit, args=(connection,), daemon=True, name="sglang-rank").start()

    def _admit(self, connection: Connection) -> None:
        """Take a client that proves the key; one that stands still blocks no other."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._take(connection)
        except (*LOST, ValueError, KeyError, TypeError):  # an unknown client or an ended rank
            connection.close()  # the engine's wait for it ends with SGLang's call

    def _take(self, connection: Connection) -> None:
        """Keep the connection of an invited rank, close any other one."""
        _prepare(connection, self._send_timeout_s)
        head = json.loads(connection.recv_bytes())
        with self._changed:
            if head["call_id"] == self._call_id:
                self._connected[head["rank"]] = connection
                self._changed.notify_all()
                return
        connection.close()


def _prepare(connection: Connection, send_timeout_s: float = 0.0) -> None:
    """Set socket options: no delay, keep-alive probes, and a timeout of sends; 0 = none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):  # on Linux
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        seconds, part = divmod(send_timeout_s, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))


def channel_addresses(host: str) -> tuple[str, str]:
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
    """Receives weight updates into one rank's parameters, and reads the parameters for verification."""

    def __init__(self) -> None:
        self._shard: SGLangShard | None = None
        self._weights = ShardWeights({})
        self._receiver: BucketReceiver | None = None

    def attach(self, model: torch.nn.Module, shard: SGLangShard) -> Reply:
        """Compare the model's parameters with the shard; return the location of this process."""
        self._shard = shard
        views, matrices = self._views(model), None
        if shard.quantized:
            quantized = shard.quantized_views(model, views)
            matrices = IncomingMatrices(shard.params(), quantized.codes.__contains__, quantized)
        self._weights = ShardWeights(views, matrices)
        return Reply(list(current_location(str(_device(model)))))

    def connect(self, model: torch.nn.Module, spec: ReceiverSpec) -> Reply:
        """Create the receiver of this rank."""
        self._receiver = BucketReceiver.connect(spec, self._weights, _device(model))
        return Reply()

    def begin(self, model: torch.nn.Module, version: int) -> Reply:
        """Begin an update."""
        assert self._shard is not None
        self._weights.tensors = views = self._views(model)
        if self._weights.matrices is not None:
            self._weights.matrices.storage = self._shard.quantized_views(model, views)
        self._shard.clear_padding(model)
        self._connected().begin(version)
        return Reply()

    def open(self, model: torch.nn.Module, session: int, interface: str | None) -> Reply:
        """Prepare to receive; gloo groups with the training ranks use a network interface, None = this rank's."""
        with environment_variables({} if interface is None else {GLOO_INTERFACE: interface}):
            self._connected().open(session)
        return Reply()

    def bucket(self, model: torch.nn.Module, index: int, messages: Sequence[Message]) -> Reply:
        """Write the rank's messages of a bucket."""
        self._connected().import_bucket(index, messages)
        _synchronize(model)
        return Reply()

    def end(self, model: torch.nn.Module, version: int) -> Reply:
        """End the update if every element was written."""
        self._connected().end(version)
        derive = getattr(model, "post_load_weights", None)
        if derive is not None:
            derive()
        return Reply()

    def close(self, model: torch.nn.Module, completed: bool) -> Reply:
        """End receiving; return the resources of this process."""
        return Reply(list(self._connected().close(completed)))

    def checksum(self, model: torch.nn.Module, selected: bool) -> Reply:
        """Return the digest of each parameter of a selected rank."""
        if not selected:
            return Reply()
        return Reply({name: tensor_checksum(tensor) for name, tensor in self._views(model).items()})

    def sums(self, model: torch.nn.Module, rectangles: Sequence[ParamRectangle]) -> Reply:
        """Return checksums of parts of parameters, computed on this rank's device."""
        self._weights.tensors = self._views(model)
        # A sent value converts to float32 and back without a change.
        sums = [self._weights.rectangle_checksum(r, convert=r.name.endswith(ALWAYS_FLOAT32)) for r in rectangles]
        return Reply(sums)

    def read(self, model: torch.nn.Module, name: str | None) -> Reply:
        """Return a parameter of a selected rank; None = another rank is selected."""
        if name is None:
            return Reply()
        tensor = self._views(model)[name].cpu().contiguous()
        values = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        return Reply(values, tensor.flatten().view(torch.uint8).numpy().tobytes())

    def _views(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Look up the parameters, which SGLang may replace when it loads a folder."""
        if self._shard is None:
            raise WeightSyncError("no engine is attached to this SGLang", code="sglang.not-attached")
        return self._shard.views(model)

    def _connected(self) -> BucketReceiver:
        if self._receiver is None:
            raise WeightSyncError(NOT_CONNECTED, code="sync.no-receivers")
        return self._receiver


_LOADER = RankLoader()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Run the engine's commands until it hangs up; see the module docstring.

    Args:
        model: SGLang's model in this rank.
        named_tensors: address of the engine, with an empty tensor.
    """
    for text, _ in named_tensors:
        call = json.loads(text)
        host, port = call["address"]
        # An engine that is lost or unreachable misses the replies. SGLang must keep running.
        with contextlib.suppress(*LOST), Client((host, port), authkey=bytes.fromhex(call["key"])) as connection:
            _prepare(connection)
            connection.send_bytes(json.dumps({"call_id": call["call_id"], "rank": call["rank"]}).encode())
            while True:
                reply = _run(model, connection.recv_bytes())
                head = {"values": reply.values, "error": reply.error, "code": reply.code}
                connection.send_bytes(json.dumps(head).encode())
                connection.send_bytes(reply.data)


def _run(model: torch.nn.Module, command: bytes) -> Reply:
    try:
        action, arguments = pickle.loads(command)  # noqa: S301 - of this run, over its own socket
        with torch.no_grad():
            reply: Reply = getattr(_LOADER, action)(model, *arguments)
    except WeightSyncError as error:
        return Reply(error=error.text, code=error.code)
    except Exception as error:
        return Reply(error=f"{type(error).__name__}: {error}", code="sync.rank-failed")
    return reply


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _synchronize(model: torch.nn.Module) -> None:
    """Wait until nothing reads the senders' memory any more."""
    device = _device(model)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
