"""Writes a Hugging Face model folder from pieces that arrive in any order from any rank."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import CheckpointError
from megarl.files import flush_path
from megarl.models.companions import copy_companions
from megarl.models.exported_config import exported_config, needs_head_bias
from megarl.models.hf_checkpoint import region
from megarl.models.hf_config import ModelConfig
from megarl.models.hf_folder import INDEX_FILE, SCORE, SCORE_BIAS, SINGLE_FILE
from megarl.models.partition import LocalParam, Piece
from megarl.replacing import put_in_place, restore_replaced


class _Assembly:
    """A Hugging Face tensor of which some rectangles have arrived."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.tensor = torch.empty(shape, dtype=dtype)
        self.missing = prod(shape)
        self._arrived: list[Piece] = []

    def add(self, piece: Piece, values: Tensor) -> None:
        """Copies a rectangle in; CheckpointError where it overlaps an earlier one."""
        for other in self._arrived:
            if all(
                a < d and c < b for a, b, c, d in zip(piece.start, piece.stop, other.start, other.stop, strict=True)
            ):
                raise CheckpointError(
                    f"tensor '{piece.hf_name}': elements {list(piece.start)} to {list(piece.stop)} arrived twice"
                )
        region(self.tensor, piece.start, piece.shape).copy_(values)
        self._arrived.append(piece)
        self.missing -= values.numel()


class HFWriter:
    """Streams an export: a shard file is written, and its memory freed, as soon as its tensors are whole.

    A value head that was put on a language model is written as a model of token classification, its bias zero
    (:func:`~megarl.models.exported_config.exported_config`).

    A context manager. Everything goes to a hidden folder beside ``path``, which is renamed when the block ends well
    and removed when it does not; so ``path`` is never half written.

    Args:
        path: folder to make.
        config: the model; its ``config.json`` is written back, with the dtype that the weights really have and the
            architecture that loads them.
        shapes: the tensors to write, from :meth:`WeightMap.hf_shapes`.
        float32: those of them that are float32 whatever the others are.
        max_shard_bytes: size above which another shard file is begun.
        copy_from: folder whose tokenizer, chat template and generation config are copied; None copies nothing.
        overwrite: replace ``path`` where it exists; a reader finds the old folder or the new one.

    Raises:
        CheckpointError: ``path`` exists and ``overwrite`` is off; and at the end of the block, where an element of a
            tensor never arrived.
    """

    def __init__(
        self,
        path: str | Path,
        config: ModelConfig,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        float32: Collection[str] = (),
        max_shard_bytes: int = 5 << 30,
        copy_from: str | Path | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self._config = config
        self._shapes = dict(shapes)
        # Megatron's scalar head has no bias; transformers' heads of token classification do.
        exported = exported_config(config, shapes, None)
        self._adds_bias = SCORE in shapes and SCORE_BIAS not in shapes and needs_head_bias(exported)
        if self._adds_bias:
            self._shapes[SCORE_BIAS] = (1,)
        self._float32 = frozenset(float32)
        self._max_shard_bytes = max_shard_bytes
        self._copy_from = Path(copy_from) if copy_from is not None else None
        self._overwrite = overwrite
        self._folder = self.path.parent / f".{self.path.name}.{uuid.uuid4().hex[:8]}.tmp"
        self._dtype: torch.dtype | None = None
        self._shard_of: dict[str, int] = {}
        self._unwritten: list[set[str]] = []  # by shard, the tensors that are not whole yet
        self._assemblies: dict[str, _Assembly] = {}

    def __enter__(self) -> HFWriter:
        restore_replaced(self.path)
        if self.path.exists() and not self._overwrite:
            raise CheckpointError(f"{self.path} exists already; remove it or choose another folder for the export")
        self._folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, param: LocalParam, tensor: Tensor) -> None:
        """Adds all pieces of a local parameter (:meth:`WeightMap.export_params`); raises as :meth:`add_piece`."""
        if tuple(tensor.shape) != param.shape:
            raise CheckpointError(
                f"parameter '{param.name}' has shape {list(tensor.shape)}, expected {list(param.shape)}"
            )
        for piece in param.pieces:
            self.add_piece(piece, region(tensor, piece.at, piece.shape))

    def add_piece(self, piece: Piece, values: Tensor) -> None:
        """Adds one rectangle, on any device.

        Raises:
            CheckpointError: the tensor is not part of the model, the rectangle lies outside it or is not of the
                values' shape, the dtype differs from what came before, or an element arrived before.
        """
        shape = self._shapes.get(piece.hf_name)
        if shape is None:
            raise CheckpointError(f"tensor '{piece.hf_name}' is not part of the model that is exported")
        inside = len(shape) == len(piece.stop) and all(b <= n for b, n in zip(piece.stop, shape, strict=True))
        if not inside or tuple(values.shape) != piece.shape:
            raise CheckpointError(
                f"tensor '{piece.hf_name}' of shape {list(shape)}: {list(values.shape)} elements do not fit at "
                f"{list(piece.start)} to {list(piece.stop)}"
            )
        self._check_dtype(piece.hf_name, values.dtype)
        if piece.hf_name not in self._unwritten[self._shard_of[piece.hf_name]]:
            raise CheckpointError(f"tensor '{piece.hf_name}': elements at {list(piece.start)} arrived twice")
        assembly = self._assemblies.get(piece.hf_name)
        if assembly is None:
            assembly = self._assemblies[piece.hf_name] = _Assembly(shape, values.dtype)
        assembly.add(piece, values.detach())
        if assembly.missing == 0:
            self._complete(piece.hf_name)

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if not self._unwritten:
            self._assign_shards(dtype.itemsize)
        if name in self._float32:
            if dtype is not torch.float32:
                raise CheckpointError(f"tensor '{name}' arrived as {dtype}, but is kept as {torch.float32}")
            return
        self._dtype = self._dtype or dtype
        if dtype != self._dtype:
            raise CheckpointError(f"tensor '{name}' arrived as {dtype}, the tensors before it as {self._dtype}")

    def _assign_shards(self, element_bytes: int) -> None:
        """Tensors to shards in checkpoint order, known before the first is written: file names carry the count."""
        used = 0
        for name, shape in self._shapes.items():
            nbytes = prod(shape) * element_bytes
            if not self._unwritten or used + nbytes > self._max_shard_bytes:
                self._unwritten.append(set())
                used = 0
            used += nbytes
            self._unwritten[-1].add(name)
            self._shard_of[name] = len(self._unwritten) - 1

    def _complete(self, name: str) -> None:
        shard = self._shard_of[name]
        self._unwritten[shard].remove(name)
        if not self._unwritten[shard]:
            mine = [n for n, s in self._shard_of.items() if s == shard]
            tensors = {n: self._assemblies.pop(n).tensor for n in mine}
            save_file(tensors, str(self._folder / self._file_name(shard)), metadata={"format": "pt"})

    def _file_name(self, shard: int) -> str:
        count = len(self._unwritten)
        return SINGLE_FILE if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"

    def _finish(self) -> None:
        if self._adds_bias and self._dtype is not None:
            self.add_piece(Piece(SCORE_BIAS, (0,), (1,), (0,)), torch.zeros(1, dtype=self._dtype))
        missing = [name for names in self._unwritten for name in sorted(names)] if self._unwritten else [*self._shapes]
        if missing:
            raise CheckpointError(
                f"export to {self.path}: {len(missing)} tensors are not whole, the first is '{missing[0]}'"
            )
        if len(self._unwritten) > 1:
            self._write_index()
        self._write_json("config.json", exported_config(self._config, self._shapes, self._dtype))
        if self._copy_from is not None:
            copy_companions(self._copy_from, self._folder)
        for path in [*self._folder.rglob("*"), self._folder]:
            flush_path(path)
        put_in_place(self._folder, self.path)

    def _write_index(self) -> None:
        assert self._dtype is not None
        total = sum(
            prod(shape) * (4 if name in self._float32 else self._dtype.itemsize) for name, shape in self._shapes.items()
        )
        placed = {name: self._file_name(shard) for name, shard in self._shard_of.items()}
        self._write_json(INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": placed})

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
