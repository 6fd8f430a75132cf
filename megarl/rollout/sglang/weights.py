"""Weight updates of an SGLang engine: checks that are independent of the transport to SGLang's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.base.errors import ConfigError, ModelError, WeightSyncError
from megarl.models.checksum import ParamRectangle, tensor_checksum
from megarl.rollout.interface import TensorSlice
from megarl.rollout.sglang.backend import ControlCaller, RequestLoop, SGLangBackend
from megarl.rollout.sglang.loader import Reply, ReplyListener
from megarl.rollout.sglang.options import LOADER, SGLangOptions
from megarl.rollout.sglang.senders import TensorSender
from megarl.rollout.sglang.shards import RankRows, SGLangShards
from megarl.rollout.sglang.whole_tensors import DiskSender, DistributedSender
from megarl.rollout.weight_checks import Coverage, check_complete

UNKNOWN_ACTION = "Unsupported"
"""Message of SGLang's weight checker in early versions without checksums."""

NOT_OPEN = "no weight update is open: begin_update(version) comes first"


class WeightSender(Protocol):
    """A transport of checked slices to SGLang's ranks."""

    needs_session: bool
    """Whether SGLang's update session must be open from ``begin`` to ``end``, in versions with one."""

    @property
    def staging_bytes(self) -> int:
        """Largest memory that held unsent slices since ``begin``, in bytes."""

    def begin(self, version: int) -> None:
        """Prepare for an update of all weights."""

    def put(self, rank: int, name: str, start: tuple[int, ...], values: Tensor) -> None:
        """Take a slice of the map's shard of a rank; its memory may be overwritten afterwards."""

    def end(self, version: int) -> None:
        """End the update; on return SGLang holds all slices under this version."""

    def abandon(self) -> None:
        """Drop unsent slices and free memory."""

    def close(self) -> None:
        """Close connections."""


class WeightSession:
    """Leads the weight updates of one engine.

    Args:
        shards: shards of the model.
        options: options of the engine.
        backend: the running SGLang.
        loop: event loop of its calls.
        call: makes a control call and waits for it.
    """

    def __init__(
        self,
        shards: SGLangShards,
        options: SGLangOptions,
        backend: SGLangBackend,
        loop: RequestLoop,
        call: ControlCaller,
    ) -> None:
        self._shards, self._options, self._call = shards, options, call
        self._sessions = loop.call(
            backend.has("begin_weight_update"), options.call_timeout_s, "reading its control calls"
        )
        self._has_loader = LOADER in loop.call(backend.loaders(), options.call_timeout_s, "reading its weight loaders")
        self._checks = loop.call(backend.has("check_weights"), options.call_timeout_s, "reading its control calls")
        self._replies = ReplyListener(backend.ranks_host)
        devices = [torch.device(options.device_of(rank)) for rank in range(shards.tp)]
        self._tensors = TensorSender(
            shards, call, self._replies, devices, backend.ranks_host is None, options.bucket_bytes
        )
        self._sender: WeightSender = self._tensors
        if options.weight_transport == "distributed":
            self._sender = DistributedSender(shards, call, options)
        elif options.weight_transport == "disk":
            self._sender = DiskSender(shards, call, options)
        else:
            self._require_loader()
        self._covers: list[dict[str, Coverage]] | None = None
        self._version = 0
        self._open = False

    def load_folder(self, path: str, version: int) -> None:
        """Load all weights from a Hugging Face folder, which SGLang's ranks read.

        Raises:
            ModelError: SGLang refuses the folder.
        """
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

    def begin(self, version: int) -> None:
        """Begin an update; see :meth:`megarl.rollout.RolloutEngine.begin_update`."""
        self.abandon()
        if self._sender.needs_session:
            self._open_session()
        self._sender.begin(version)
        self._version = version
        self._covers = [
            {name: Coverage(name, self._shards.live_shape(rank, name)) for name in shard}
            for rank, shard in enumerate(self._shards.params)
        ]

    @property
    def staging_bytes(self) -> int:
        """See :attr:`megarl.rollout.RolloutEngine.staging_bytes`."""
        return self._sender.staging_bytes

    def write(self, slices: Iterable[TensorSlice], rank: int) -> None:
        """Check and send slices; see :meth:`megarl.rollout.RolloutEngine.update_weights`."""
        if self._covers is None:
            raise WeightSyncError(NOT_OPEN)
        if not 0 <= rank < self._shards.tp:
            raise WeightSyncError(f"tensor-parallel rank {rank}, expected 0 to {self._shards.tp - 1}")
        # A failure in the middle loses the update: it cannot be ended any more.
        covers, self._covers = self._covers, None
        try:
            for tensor_slice in slices:
                self._write_slice(tensor_slice, rank, covers[rank])
        except BaseException:
            self._sender.abandon()
            raise
        self._covers = covers

    def end(self, version: int) -> None:
        """End the update; see :meth:`megarl.rollout.RolloutEngine.end_update`."""
        if self._covers is None:
            raise WeightSyncError(NOT_OPEN)
        covers, self._covers = self._covers, None
        try:
            if version != self._version:
                raise WeightSyncError(f"update to weight version {self._version} was ended as version {version}")
            check_complete((cover for shard in covers for cover in shard.values()), version)
            self._sender.end(version)
        finally:
            self._sender.abandon()
        self._close_session()

    def abandon(self) -> None:
        """Drop an open update."""
        self._covers = None
        self._sender.abandon()

    def close(self) -> None:
        """Free the memory and close the connections of updates."""
        self.abandon()
        self._sender.close()
        self._replies.close()

    def params(self, rank: int) -> Mapping[str, Tensor]:
        """Return the parameters of one rank in the map's form; each look-up reads SGLang."""
        return _RankParams(self, self._shards, rank)

    def checksum(self, rank: int) -> dict[str, str]:
        """Return the digest of each parameter of one rank in the map's form."""
        params = self._shards.params[rank]
        local = {name: part for name in params if (part := self._whole_rows(rank, name)) is not None}
        rows = {name: [part.name, part.first, part.rows] for name, part in local.items()}
        replies = self._command("checksum", [{"rows": rows if r == rank else {}} for r in range(self._shards.tp)])
        digests = replies[rank].values
        held = self.params(rank)
        return {name: digests[name] if name in local else tensor_checksum(held[name]) for name in params}

    def rectangle_checksums(self, rectangles: Sequence[Sequence[ParamRectangle]]) -> list[list[int]]:
        """Return checksums of parts of the map's shards; the parts of one that is on several ranks are added up."""
        tiles: list[list[ParamRectangle]] = [[] for _ in range(self._shards.tp)]
        origins: list[list[tuple[int, int]]] = [[] for _ in tiles]
        for rank, parts in enumerate(rectangles):
            for index, part in enumerate(parts):
                for holder, tile in self._shards.rank_rectangles(rank, part):
                    tiles[holder].append(tile)
                    origins[holder].append((rank, index))
        sums = [[0] * len(parts) for parts in rectangles]
        replies = self._command("sums", [{"rectangles": parts} for parts in tiles])
        for holder, reply in replies.items():
            for (rank, index), checksum in zip(origins[holder], reply.values["checksums"], strict=True):
                sums[rank][index] = (sums[rank][index] + checksum) % 2**64
        return sums

    def fingerprint(self) -> tuple[str, ...]:
        """Return the checksum of each rank's weights by SGLang's checker; empty in versions without checksums."""
        if not self._checks:
            return ()
        self._flush()
        outcome = self._call("check_weights", action="checksum")
        if not outcome.success and UNKNOWN_ACTION not in outcome.message:
            raise WeightSyncError(f"SGLang could not check its weights: {outcome.message}")
        return tuple(str(rank["per_gpu_checksum"]) for rank in outcome.ranks)

    def read(self, rank: int, name: str, first: int, rows: int) -> Tensor:
        """Return rows of a parameter in SGLang's rank."""
        fields = [{"name": name, "first": first, "rows": rows if r == rank else 0} for r in range(self._shards.tp)]
        reply = self._command("read", fields)[rank]
        data = torch.frombuffer(bytearray(reply.data), dtype=getattr(torch, reply.values["dtype"]))
        return data.view(reply.values["shape"])

    def _whole_rows(self, rank: int, name: str) -> RankRows | None:
        """Return the rows of the map's shard if the rank itself holds all of them."""
        parts = self._shards.rank_rows(rank, name)
        is_whole = len(parts) == 1 and (parts[0].rank, parts[0].rows) == (
            rank,
            self._shards.params[rank][name].shape[0],
        )
        return parts[0] if is_whole else None

    def _command(self, action: str, fields: list[dict[str, Any]]) -> dict[int, Reply]:
        """Send a command that writes nothing; SGLang accepts it only within an update session."""
        self._require_loader()
        self._flush()
        was_open = self._open
        self._open_session()
        try:
            return self._tensors.command(action, fields)
        finally:
            if not was_open:
                self._close_session()

    def _flush(self) -> None:
        """Send the collected slices, since verification reads them before the update ends."""
        if self._covers is not None and self._sender is self._tensors:
            self._tensors.flush()

    def _write_slice(self, tensor_slice: TensorSlice, rank: int, covers: dict[str, Coverage]) -> None:
        name, values = tensor_slice[0], tensor_slice[-1]
        if name not in covers:
            raise WeightSyncError(f"'{name}' is not a parameter of this model ({len(covers)} parameters)")
        shape = self._shards.params[rank][name].shape
        start = tuple(tensor_slice[1]) if len(tensor_slice) == 3 else (0,) * values.dim()
        if len(tensor_slice) == 2 and tuple(values.shape) != shape:
            raise WeightSyncError(f"'{name}': shape {list(values.shape)}, expected {list(shape)} (no offset given)")
        if start and start[0] >= 0 and start[0] + len(values) <= shape[0]:
            # Padding rows of the vocabulary are always zero in SGLang.
            values = values[: max(0, covers[name].shape[0] - start[0])]
            if not values.numel():
                return
        covers[name].add(start, values.shape)
        self._sender.put(rank, name, start, values)

    def _require_loader(self) -> None:
        if not self._has_loader:
            raise ConfigError(
                f"the SGLang server was started without megarl's weight loader: start it with --custom-weight-loader "
                f"{LOADER} (and megarl installed there), or set rollout.engine_kwargs.sglang.weight_transport to "
                "'distributed' or 'disk'"
            )

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

    def __init__(self, session: WeightSession, shards: SGLangShards, rank: int) -> None:
        self._session, self._shards, self._rank = session, shards, rank

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shards.params[self._rank][name].shape
        parts = [self._session.read(*part) for part in self._shards.rank_rows(self._rank, name) if part.rows]
        missing = shape[0] - sum(len(part) for part in parts)
        if missing:
            like = parts[0] if parts else self._session.read(self._rank, name, 0, 0)
            parts.append(torch.zeros(missing, *shape[1:], dtype=like.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards.params[self._rank])

    def __len__(self) -> int:
        return len(self._shards.params[self._rank])
