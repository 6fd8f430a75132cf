"""Weight transports of whole Hugging Face tensors to SGLang's ranks: a process group, or a folder.

Every rank receives all tensors and keeps its part. The shards of all ranks are assembled here first.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from megarl.base.errors import WeightSyncError
from megarl.base.rendezvous import host_store
from megarl.models import LocalParam
from megarl.rollout.sglang.backend import ControlCaller
from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.shards import SGLangShards

_GROUP_NUMBERS = itertools.count()


class TensorAssembler:
    """Assembles whole tensors from shards; of elements on several ranks, the first rank's count.

    Args:
        shards: parameters by rank and name.
    """

    def __init__(self, shards: list[dict[str, LocalParam]]) -> None:
        self._shards = shards
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._owners: dict[tuple[str, tuple[int, ...]], int] = {}
        for rank, shard in enumerate(shards):
            for piece in (piece for param in shard.values() for piece in param.pieces):
                self._owners.setdefault((piece.hf_name, piece.start), rank)
                shape = self._shapes.get(piece.hf_name, piece.stop)
                self._shapes[piece.hf_name] = tuple(map(max, shape, piece.stop))
        self._tensors: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the incomplete tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def clear(self) -> None:
        """Drop all values."""
        self._tensors, self._missing = {}, {}

    def put(self, rank: int, name: str, start: tuple[int, ...], values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Add a slice of a rank's parameter; yield and drop the tensors that it completes."""
        stop = tuple(a + n for a, n in zip(start, values.shape, strict=True))
        for piece in self._shards[rank][name].pieces:
            if self._owners[piece.hf_name, piece.start] != rank:
                continue
            low = tuple(map(max, start, piece.at))
            high = tuple(min(a, b + n) for a, b, n in zip(stop, piece.at, piece.local_shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = values[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
            stacked = len(piece.at) - len(piece.start)
            at = [a - b + s for a, b, s in zip(low[stacked:], piece.at[stacked:], piece.start, strict=True)]
            part = part.reshape(part.shape[stacked:])
            yield from self._copy(piece.hf_name, at, part)

    def _copy(self, hf_name: str, at: list[int], part: Tensor) -> Iterator[tuple[str, Tensor]]:
        shape = self._shapes[hf_name]
        if hf_name not in self._tensors:
            self._tensors[hf_name] = torch.empty(shape, dtype=part.dtype, device=part.device)
            self._missing[hf_name] = prod(shape)
        box = tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))
        self._tensors[hf_name][box].copy_(part)
        self._missing[hf_name] -= part.numel()
        if not self._missing[hf_name]:
            del self._missing[hf_name]
            yield hf_name, self._tensors.pop(hf_name)


class WholeTensorSender:
    """Base of both transports: assembles tensors and sends them in buckets."""

    needs_session = True

    def __init__(self, shards: SGLangShards, call: ControlCaller, options: SGLangOptions) -> None:
        self._call, self._options, self._tp = call, options, shards.tp
        self._assembler = TensorAssembler(shards.params)
        self._bucket: list[tuple[str, Tensor]] = []
        self._bytes = 0
        self.staging_bytes = 0

    def begin(self, version: int) -> None:
        """See :class:`megarl.rollout.sglang.weights.WeightSender`."""
        self.abandon()
        self.staging_bytes = 0

    def put(self, rank: int, name: str, start: tuple[int, ...], values: Tensor) -> None:
        """See :class:`megarl.rollout.sglang.weights.WeightSender`."""
        for hf_name, tensor in self._assembler.put(rank, name, start, values):
            self._bucket.append((hf_name, tensor))
            self._bytes += tensor.nbytes
            self.staging_bytes = max(self.staging_bytes, self._bytes + self._assembler.nbytes)
            if self._bytes >= self._options.bucket_bytes:
                self._flush(None)
        self.staging_bytes = max(self.staging_bytes, self._bytes + self._assembler.nbytes)

    def end(self, version: int) -> None:
        """See :class:`megarl.rollout.sglang.weights.WeightSender`."""
        self._flush(version)

    def abandon(self) -> None:
        """See :class:`megarl.rollout.sglang.weights.WeightSender`."""
        self._assembler.clear()
        self._bucket, self._bytes = [], 0

    def close(self) -> None:
        """See :class:`megarl.rollout.sglang.weights.WeightSender`."""

    def _flush(self, version: int | None) -> None:
        bucket, self._bucket, self._bytes = self._bucket, [], 0
        self._send(bucket, version)

    def _send(self, bucket: list[tuple[str, Tensor]], version: int | None) -> None:
        raise NotImplementedError


class DistributedSender(WholeTensorSender):
    """Broadcasts to SGLang's ranks in a process group: gloo on a CPU, NCCL on GPUs."""

    def __init__(self, shards: SGLangShards, call: ControlCaller, options: SGLangOptions) -> None:
        super().__init__(shards, call, options)
        self._group: Any = None
        self._name = f"megarl-weights-{next(_GROUP_NUMBERS)}"

    def begin(self, version: int) -> None:
        """Join the process group on the first update.

        Raises:
            WeightSyncError: SGLang does not join.
        """
        super().begin(version)
        if self._group is None:
            self._join()

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            self._group = None
            self._call("destroy_weights_update_group", group_name=self._name)

    def _join(self) -> None:
        from sglang.srt.utils.common import init_custom_process_group

        backend = "gloo" if self._options.is_cpu else "nccl"
        store = host_store("127.0.0.1", timeout=timedelta(seconds=self._options.call_timeout_s))
        groups: list[Any] = []

        def join() -> None:
            groups.append(
                init_custom_process_group(
                    backend=backend,
                    store=PrefixStore(self._name, store),
                    world_size=1 + self._tp,
                    rank=0,
                    group_name=self._name,
                )
            )

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        outcome = self._call(
            "init_weights_update_group",
            master_address="127.0.0.1",
            master_port=store.port,
            rank_offset=1,
            world_size=1 + self._tp,
            group_name=self._name,
            backend=backend,
        )
        if not outcome.success:
            raise WeightSyncError(f"SGLang did not join the group that carries the weights: {outcome.message}")
        thread.join(self._options.call_timeout_s)
        if not groups:
            raise WeightSyncError("this process did not join the group that carries the weights")
        self._group = groups[0]

    def _send(self, bucket: list[tuple[str, Tensor]], version: int | None) -> None:
        tensors = [tensor.contiguous() for _, tensor in bucket]
        thread = threading.Thread(target=self._broadcast, args=(tensors,), daemon=True)
        thread.start()
        outcome = self._call(
            "update_weights_from_distributed",
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
            group_name=self._name,
            flush_cache=version is not None,
            weight_version=None if version is None else str(version),
        )
        if not outcome.success:
            raise WeightSyncError(f"SGLang refused broadcast weights: {outcome.message}")
        thread.join(self._options.call_timeout_s)

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0, group=self._group)


class DiskSender(WholeTensorSender):
    """Writes a folder that SGLang's ranks read; they must see this process's temporary folder."""

    needs_session = False

    def __init__(self, shards: SGLangShards, call: ControlCaller, options: SGLangOptions) -> None:
        super().__init__(shards, call, options)
        self._folder: Path | None = None
        self._files: dict[str, str] = {}

    def abandon(self) -> None:
        """Delete the folder."""
        super().abandon()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._files = None, {}

    def _send(self, bucket: list[tuple[str, Tensor]], version: int | None) -> None:
        from safetensors.torch import save_file

        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="megarl-weights-"))
        if bucket:
            file = f"model-{len(set(self._files.values())):05d}.safetensors"
            save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, self._folder / file)
            self._files |= {name: file for name, _ in bucket}
        if version is None:
            return
        index = {"metadata": {}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        outcome = self._call(
            "update_weights_from_disk",
            model_path=str(self._folder),
            load_format="auto",
            weight_version=str(version),
            flush_cache=True,
        )
        if not outcome.success:
            raise WeightSyncError(f"SGLang could not load the weights from {self._folder}: {outcome.message}")
