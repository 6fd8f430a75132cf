"""Weight updates: what is checked here, whatever the way to SGLang's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.errors import ConfigError, ModelError, WeightSyncError
from megarl.models.checksum import tensor_checksum
from megarl.rollout.coverage import Coverage, check_complete
from megarl.rollout.interface import Slab
from megarl.rollout.sglang.backend import Backend, CallServer, Loop
from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.placement import Held, Placement
from megarl.rollout.sglang.replies import Replies, Reply
from megarl.rollout.sglang.senders import TensorSender
from megarl.rollout.sglang.server_args import LOADER
from megarl.rollout.sglang.whole_tensors import DiskSender, DistributedSender

UNKNOWN_ACTION = "Unsupported"
"""Said by a checker of weights that knows no checksums, as in early versions."""

NOT_OPEN = "no weight update is open: begin_update(version) comes first"


class Sender(Protocol):
    """Brings slabs, checked and complete, to SGLang's ranks."""

    needs_session: bool
    """SGLang's own session is open from ``begin`` to ``end``, in versions that have one."""

    def begin(self, version: int) -> None:
        """Gets ready for all weights."""

    def put(self, rank: int, name: str, start: tuple[int, ...], values: Tensor) -> None:
        """Takes a rectangle of the map's shard of a rank; it may be overwritten afterwards."""

    def end(self, version: int) -> None:
        """Everything was put: returns when SGLang holds it, under this version."""

    def abandon(self) -> None:
        """Drops what was put, and gives memory back."""

    def close(self) -> None:
        """Ends connections."""


class WeightSession:
    """The update under way, if there is one.

    Args:
        placement: of the model's shards.
        options: of the engine.
        backend: SGLang.
        loop: where its calls run.
        call: makes a control call and waits for it.
    """

    def __init__(
        self, placement: Placement, options: SGLangOptions, backend: Backend, loop: Loop, call: CallServer
    ) -> None:
        self._placement, self._options, self._call = placement, options, call
        self._sessions = loop.call(backend.has("begin_weight_update"), options.call_timeout_s, "asking for its calls")
        self._has_loader = LOADER in loop.call(
            backend.loaders(), options.call_timeout_s, "asking for its weight loaders"
        )
        self._checks = loop.call(backend.has("check_weights"), options.call_timeout_s, "asking for its calls")
        self._replies = Replies(backend.ranks_host)
        devices = [torch.device(options.device_of(rank)) for rank in range(placement.tp)]
        self._tensors = TensorSender(
            placement, call, self._replies, devices, backend.ranks_host is None, options.bucket_bytes
        )
        self._sender: Sender = self._tensors
        if options.weight_transport == "distributed":
            self._sender = DistributedSender(placement, call, options)
        elif options.weight_transport == "disk":
            self._sender = DiskSender(placement, call, options)
        else:
            self._require_loader()
        self._covers: list[dict[str, Coverage]] | None = None
        self._version = 0
        self._open = False

    def load_folder(self, path: str, version: int) -> None:
        """Replaces all weights by those of a Hugging Face folder, which SGLang's ranks read.

        Raises:
            ModelError: SGLang refuses it.
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
        """Opens a session; see :meth:`megarl.rollout.RolloutEngine.begin_update`."""
        self.abandon()
        if self._sender.needs_session:
            self._open_session()
        self._sender.begin(version)
        self._version = version
        self._covers = [
            {name: Coverage(name, self._placement.live_shape(rank, name)) for name in shard}
            for rank, shard in enumerate(self._placement.params)
        ]

    def write(self, slabs: Iterable[Slab], rank: int) -> None:
        """Checks and sends slabs; see :meth:`megarl.rollout.RolloutEngine.update_weights`."""
        if self._covers is None:
            raise WeightSyncError(NOT_OPEN)
        if not 0 <= rank < self._placement.tp:
            raise WeightSyncError(f"tensor-parallel rank {rank}, expected 0 to {self._placement.tp - 1}")
        # A failure in the middle loses the session: nothing can end it any more.
        covers, self._covers = self._covers, None
        try:
            for slab in slabs:
                self._write_slab(slab, rank, covers[rank])
        except BaseException:
            self._sender.abandon()
            raise
        self._covers = covers

    def end(self, version: int) -> None:
        """Closes the session; see :meth:`megarl.rollout.RolloutEngine.end_update`."""
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
        """Drops an update under way."""
        self._covers = None
        self._sender.abandon()

    def close(self) -> None:
        """Gives back what updates held."""
        self.abandon()
        self._sender.close()
        self._replies.close()

    def held(self, rank: int) -> Mapping[str, Tensor]:
        """The parameters of one rank in the map's form, each read from SGLang when it is looked up."""
        return _Held(self, self._placement, rank)

    def checksum(self, rank: int) -> dict[str, str]:
        """Digest of each parameter of one rank in the map's form."""
        params = self._placement.params[rank]
        whole = {name: part for name in params if (part := self._lies_together(rank, name)) is not None}
        rows = {name: [part.name, part.first, part.rows] for name, part in whole.items()}
        own = self._ask("checksum", [{"rows": rows if r == rank else {}} for r in range(self._placement.tp)])[
            rank
        ].facts
        held = self.held(rank)
        return {name: own[name] if name in whole else tensor_checksum(held[name]) for name in params}

    def fingerprint(self) -> tuple[str, ...]:
        """What SGLang's own checker says of each rank's parameters and buffers; empty where it has no checksums."""
        if not self._checks:
            return ()
        self._flush()
        outcome = self._call("check_weights", action="checksum")
        if not outcome.success and UNKNOWN_ACTION not in outcome.message:
            raise WeightSyncError(f"SGLang could not check its weights: {outcome.message}")
        return tuple(str(rank["per_gpu_checksum"]) for rank in outcome.ranks)

    def read(self, rank: int, name: str, first: int, rows: int) -> Tensor:
        """Rows of a parameter as SGLang's rank holds it."""
        fields = [{"name": name, "first": first, "rows": rows if r == rank else 0} for r in range(self._placement.tp)]
        reply = self._ask("read", fields)[rank]
        data = torch.frombuffer(bytearray(reply.data), dtype=getattr(torch, reply.facts["dtype"]))
        return data.view(reply.facts["shape"])

    def _lies_together(self, rank: int, name: str) -> Held | None:
        """Where the rank itself has all rows of the map's shard, if it does."""
        parts = self._placement.held(rank, name)
        is_whole = len(parts) == 1 and (parts[0].rank, parts[0].rows) == (
            rank,
            self._placement.params[rank][name].shape[0],
        )
        return parts[0] if is_whole else None

    def _ask(self, action: str, fields: list[dict[str, Any]]) -> dict[int, Reply]:
        """An order to the loader that writes nothing; SGLang takes it within a session only."""
        self._require_loader()
        self._flush()
        was_open = self._open
        self._open_session()
        try:
            return self._tensors.order(action, fields)
        finally:
            if not was_open:
                self._close_session()

    def _flush(self) -> None:
        """A sync is verified before it ends: what was taken in must be there to be read."""
        if self._covers is not None and self._sender is self._tensors:
            self._tensors.flush()

    def _write_slab(self, slab: Slab, rank: int, covers: dict[str, Coverage]) -> None:
        name, values = slab[0], slab[-1]
        if name not in covers:
            raise WeightSyncError(f"'{name}' is not a parameter of this model ({len(covers)} parameters)")
        shape = self._placement.params[rank][name].shape
        start = tuple(slab[1]) if len(slab) == 3 else (0,) * values.dim()
        if len(slab) == 2 and tuple(values.shape) != shape:
            raise WeightSyncError(f"'{name}': shape {list(values.shape)}, expected {list(shape)} (no offset given)")
        if start and start[0] >= 0 and start[0] + len(values) <= shape[0]:
            # Rows that pad the vocabulary hold zeros in SGLang, whatever is sent for them.
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


class _Held(Mapping[str, Tensor]):
    """One rank's parameters, fetched one at a time."""

    def __init__(self, session: WeightSession, placement: Placement, rank: int) -> None:
        self._session, self._placement, self._rank = session, placement, rank

    def __getitem__(self, name: str) -> Tensor:
        shape = self._placement.params[self._rank][name].shape
        parts = [self._session.read(*part) for part in self._placement.held(self._rank, name) if part.rows]
        missing = shape[0] - sum(len(part) for part in parts)
        if missing:
            like = parts[0] if parts else self._session.read(self._rank, name, 0, 0)
            parts.append(torch.zeros(missing, *shape[1:], dtype=like.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._placement.params[self._rank])

    def __len__(self) -> int:
        return len(self._placement.params[self._rank])
