"""The weight loader inside each of SGLang's ranks.

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
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
from torch import Tensor

from megarl.base.child_process import environment_variables
from megarl.base.errors import WeightSyncError
from megarl.base.ports import GLOO_INTERFACE
from megarl.models.verification import ParamRectangle, tensor_checksum
from megarl.sharding.placement import current_location
from megarl.sharding.quantization import IncomingMatrices
from megarl.sharding.receiver import NOT_CONNECTED, BucketReceiver, ReceiverSpec, ShardWeights
from megarl.sharding.sender import Message
from megarl.sharding.sglang_shard import ALWAYS_FLOAT32, SGLangShard

LOST = (OSError, EOFError, AuthenticationError)
"""Errors of a connection whose other end is gone, or is not the expected one."""


@dataclass(frozen=True)
class Reply:
    """A rank's reply to a command.

    Attributes:
        values: values that JSON can encode.
        code: its code, see :class:`~megarl.base.errors.MegarlError`.
    """

    values: Any = None
    data: bytes = b""
    error: str = ""
    code: str = ""


def set_socket_options(connection: Connection, send_timeout_s: float = 0.0) -> None:
    """Set socket options: no delay, keep-alive probes, and a timeout of sends; 0 = none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):  # on Linux
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        seconds, part = divmod(send_timeout_s, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))


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
            self._connected().peers.open(session)
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
    """Run the engine's commands until it hangs up; see the module docstring."""
    for text, _ in named_tensors:
        call = json.loads(text)
        host, port = call["address"]
        # An engine that is lost or unreachable misses the replies. SGLang must keep running.
        with contextlib.suppress(*LOST), Client((host, port), authkey=bytes.fromhex(call["key"])) as connection:
            set_socket_options(connection)
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
