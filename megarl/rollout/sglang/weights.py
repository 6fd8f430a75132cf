"""Weight updates of an SGLang engine: passes the commands of a sync on to SGLang's ranks."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.base.errors import ConfigError, ModelError, WeightSyncError
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import ModelConfig
from megarl.models.checksum import ParamRectangle
from megarl.rollout.interface import NOT_CONNECTED
from megarl.rollout.sglang.backend import ControlCaller, RequestLoop, SGLangBackend
from megarl.rollout.sglang.loader import Reply, ReplyListener
from megarl.rollout.sglang.options import GLOO_INTERFACE, LOADER, SGLangOptions
from megarl.rollout.sglang.shards import SGLangShard
from megarl.rollout.weight_checks import NOT_OPEN
from megarl.sharding.placement import ProcessLocation
from megarl.sharding.plan import TransferUsage
from megarl.sharding.receiver import ReceiverSpec, route_messages
from megarl.sharding.sender import Message

UNKNOWN_ACTION = "Unsupported"
"""Message of SGLang's weight checker in early versions without checksums."""

REPLY_S = 60.0
"""Seconds to wait for replies after SGLang has finished the call."""


class WeightSession:
    """Leads the weight updates of one engine.

    Args:
        config: the model.
        options: options of the engine.
        backend: the running SGLang.
        loop: event loop of its calls.
        call: makes a control call and waits for it.

    Raises:
        ConfigError: SGLang runs without megarl's weight loader.
        WeightSyncError: SGLang's ranks hold other parameters than the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: SGLangOptions,
        backend: SGLangBackend,
        loop: RequestLoop,
        call: ControlCaller,
    ) -> None:
        self._call, self._tp = call, options.tensor_parallel_size
        self._sessions = loop.call(
            backend.has("begin_weight_update"), options.call_timeout_s, "reading its control calls"
        )
        self._checks = loop.call(backend.has("check_weights"), options.call_timeout_s, "reading its control calls")
        if LOADER not in loop.call(backend.loaders(), options.call_timeout_s, "reading its weight loaders"):
            raise ConfigError(
                "the SGLang server was started without megarl's weight loader: start it with --custom-weight-loader "
                f"{LOADER}, and with megarl installed there"
            )
        self._replies = ReplyListener(backend.ranks_host)
        # SGLang's ranks talk to each other over loopback, and to training ranks of other nodes as this process does.
        self._interface = os.environ.get(GLOO_INTERFACE) if backend.ranks_host is None else None
        self._command_ids = itertools.count()
        self._open = False
        self._ranks: list[int] = []
        self._in_update = False
        self._transfer: int | None = None
        self._largest_command = 0
        quantized = options.quantization is not None
        self._shards = [SGLangShard(config, self._tp, rank, quantized) for rank in range(self._tp)]
        self._names = [param.name for param in self._shards[0].params()]
        replies = self._query("attach", [(shard,) for shard in self._shards])
        self.locations = [ProcessLocation(r.values[0], r.values[1], tuple(r.values[2])) for r in replies]

    def load_folder(self, path: str, version: int) -> None:
        """Load all weights from a Hugging Face folder, which SGLang's ranks read.

        Raises:
            ModelError: SGLang refuses the folder, or holds its weights in FP8, which the folder does not have.
        """
        if self._shards[0].quantized:
            raise ModelError(
                f"{QUANTIZATION_KEY}={FP8}: SGLang cannot quantize model folder {path}; its weights come from a sync"
            )
        self.abandon()
        self._close_session()
        outcome = self._call(
            "update_weights_from_disk",
            model_path=os.path.abspath(path),
            load_format="auto",
            weight_version=str(version),
            flush_cache=True,
        )
        if not outcome.success:
            raise ModelError(f"SGLang could not load model folder {path}: {outcome.message}")

    def connect(self, specs: Sequence[ReceiverSpec]) -> None:
        """Create the receivers; see :meth:`megarl.rollout.RolloutEngine.connect_receivers`."""
        self._query("connect", [(spec,) for spec in specs])
        self._transfer = None
        self._ranks = [spec.plan.rank for spec in specs]

    def begin(self, version: int) -> None:
        """Begin an update; see :meth:`megarl.rollout.RolloutEngine.begin_update`."""
        self.abandon()
        if not self._ranks:
            raise WeightSyncError(NOT_CONNECTED)
        self._largest_command = 0
        self._open_session()
        self._command("begin", [(version,)] * self._tp)
        self._in_update = True

    def open(self, session: int) -> None:
        """Prepare to receive; see :meth:`megarl.rollout.RolloutEngine.open_transfer`."""
        if session != self._transfer:
            self._query("open", [(session, self._interface)] * self._tp)
            self._transfer = session

    def import_bucket(self, index: int, messages: Sequence[Message]) -> None:
        """Let the ranks read a bucket; see :meth:`megarl.rollout.RolloutEngine.import_bucket`."""
        if not self._in_update:
            raise WeightSyncError(NOT_OPEN)
        try:
            self._command("bucket", [(index, part) for part in route_messages(messages, self._ranks)])
        except BaseException:
            self.abandon()  # a rank may have written its part
            raise

    def close_transfer(self, completed: bool) -> list[TransferUsage]:
        """End receiving; the last entry is the memory of this process's largest command."""
        if not completed:
            self._transfer = None
        replies = self._query("close", [(completed,)] * self._tp)
        return [*(TransferUsage(*reply.values) for reply in replies), TransferUsage(self._largest_command)]

    def end(self, version: int) -> None:
        """End the update; see :meth:`megarl.rollout.RolloutEngine.end_update`."""
        if not self._in_update:
            raise WeightSyncError(NOT_OPEN)
        self._in_update = False
        self._command("end", [(version,)] * self._tp, name=str(version))
        self._close_session()

    def abandon(self) -> None:
        """Drop an open update."""
        self._in_update = False

    def close(self) -> None:
        """Close the connections of updates."""
        self.abandon()
        self._replies.close()

    def params(self, rank: int) -> Mapping[str, Tensor]:
        """Return the parameters of one rank; each look-up reads SGLang."""
        return _RankParams(self, rank, self._names)

    def checksum(self, rank: int) -> dict[str, str]:
        """Return the digest of each parameter of one rank."""
        digests: dict[str, str] = self._query("checksum", [(r == rank,) for r in range(self._tp)])[rank].values
        return digests

    def rectangle_checksums(self, rectangles: Sequence[Sequence[ParamRectangle]]) -> list[list[int]]:
        """Return checksums of parts of the parameters, computed in all ranks at once."""
        return [list(reply.values) for reply in self._query("sums", [(parts,) for parts in rectangles])]

    def fingerprint(self) -> tuple[str, ...]:
        """Return the checksum of each rank's weights by SGLang's checker; empty in versions without checksums."""
        if not self._checks:
            return ()
        outcome = self._call("check_weights", action="checksum")
        if not outcome.success and UNKNOWN_ACTION not in outcome.message:
            raise WeightSyncError(f"SGLang could not check its weights: {outcome.message}")
        return tuple(str(rank["per_gpu_checksum"]) for rank in outcome.ranks)

    def read(self, rank: int, name: str) -> Tensor:
        """Return a parameter of SGLang's rank."""
        reply = self._query("read", [(name if r == rank else None,) for r in range(self._tp)])[rank]
        data = torch.frombuffer(bytearray(reply.data), dtype=getattr(torch, reply.values["dtype"]))
        return data.view(reply.values["shape"])

    def _query(self, action: str, arguments: Sequence[tuple[Any, ...]]) -> list[Reply]:
        """Send a command that may come outside an update; SGLang accepts it only within an update session."""
        was_open = self._open
        self._open_session()
        try:
            return self._command(action, arguments)
        finally:
            if not was_open:
                self._close_session()

    def _command(self, action: str, arguments: Sequence[tuple[Any, ...]], name: str | None = None) -> list[Reply]:
        """Send a command to every rank and return the replies.

        Args:
            action: method of the loader.
            arguments: its arguments by rank.
            name: new name of the weights in SGLang, which then empties its caches.

        Raises:
            WeightSyncError: SGLang or a rank refuses.
        """
        command_id = next(self._command_ids)
        payloads = []
        for rank, values in enumerate(arguments):
            command = {"action": action, "command_id": command_id, "rank": rank, "to": self._replies.to}
            data = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)
            payloads.append(pickle.dumps([(json.dumps(command), data)]))
        self._largest_command = max(self._largest_command, sum(map(len, payloads)))
        outcome = self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=payloads,
            load_format=LOADER,
            flush_cache=name is not None,
            weight_version=name,
        )
        if not outcome.success:
            raise WeightSyncError(f"SGLang refused '{action}' of its weight loader: {outcome.message}")
        replies = self._replies.collect(command_id, set(range(len(arguments))), REPLY_S)
        return [replies[rank] for rank in range(len(arguments))]

    def _open_session(self) -> None:
        if self._sessions and not self._open:
            outcome = self._call("begin_weight_update")
            if not outcome.success:
                raise WeightSyncError(f"SGLang did not begin a weight update: {outcome.message}")
            self._open = True

    def _close_session(self) -> None:
        if self._open:
            outcome = self._call("end_weight_update")
            if not outcome.success:
                raise WeightSyncError(f"SGLang did not end the weight update: {outcome.message}")
            self._open = False


class _RankParams(Mapping[str, Tensor]):
    """Parameters of one rank, read from SGLang one at a time."""

    def __init__(self, session: WeightSession, rank: int, names: Sequence[str]) -> None:
        self._session, self._rank, self._names = session, rank, names

    def __getitem__(self, name: str) -> Tensor:
        return self._session.read(self._rank, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
