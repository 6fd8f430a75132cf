"""The weight loader inside each of SGLang's ranks, and the channel for its replies to the engine.

SGLang calls :func:`load` with the model and a list of (name, tensor) for ``update_weights_from_tensor``. The name is a
command in JSON, the tensor its pickled arguments. Weights are not among them, except with the transport ``inline``: the
rank's :class:`~megarl.sharding.receiver.BucketReceiver` reads them from the training ranks.

SGLang does not report errors of a custom loader, and an exception would end the server. So the loader never raises:
each rank connects to the engine and replies to each command, with an error if needed. Connections are authenticated
with a key that the command contains.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
from torch import Tensor

from megarl.base.environment import environment_variables
from megarl.base.errors import WeightSyncError
from megarl.base.ports import interface_of
from megarl.models.checksum import ParamRectangle, tensor_checksum
from megarl.rollout.interface import NOT_CONNECTED
from megarl.rollout.quantization import IncomingMatrices
from megarl.rollout.sglang.options import GLOO_INTERFACE
from megarl.rollout.sglang.shards import ALWAYS_FLOAT32, SGLangShard
from megarl.rollout.weight_checks import ShardWeights
from megarl.sharding.placement import current_location
from megarl.sharding.receiver import BucketReceiver, ReceiverSpec
from megarl.sharding.sender import Message


@dataclass(frozen=True)
class Reply:
    """A rank's reply to a command.

    Attributes:
        values: values that JSON can encode.
        data: bytes of a tensor.
        error: reason of a failure; empty on success.
    """

    values: Any = None
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
    head = {"command_id": command_id, "rank": rank, "values": reply.values, "error": reply.error}
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
            raise WeightSyncError("no engine is attached to this SGLang")
        return self._shard.views(model)

    def _connected(self) -> BucketReceiver:
        if self._receiver is None:
            raise WeightSyncError(NOT_CONNECTED)
        return self._receiver


_LOADER = RankLoader()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Run commands; see the module docstring.

    Args:
        model: SGLang's model in this rank.
        named_tensors: commands with their arguments.
    """
    for text, data in named_tensors:
        command = json.loads(text)
        try:
            arguments = pickle.loads(data.cpu().numpy().data)
            with torch.no_grad():
                reply: Reply = getattr(_LOADER, command["action"])(model, *arguments)
        except Exception as error:
            reply = Reply(
                error=f"{error}" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
            )
        send_reply(command["to"], command["command_id"], command["rank"], reply)


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _synchronize(model: torch.nn.Module) -> None:
    """Wait until nothing reads the senders' memory any more."""
    device = _device(model)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
