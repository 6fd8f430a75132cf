"""Write a Hugging Face model folder: ``config.json``, tokenizer files, and weights from pieces in any order.

:class:`HFWriter` streams the weights of an export; the other functions write the files next to the weights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megarl.base.atomic_write import replace_folder, restore_replaced_folder
from megarl.base.errors import CheckpointError, ExportError
from megarl.base.files import flush_path
from megarl.models.carried_tensors import carried_tensors, with_multi_token_layers
from megarl.models.end_tokens import GENERATION_FILE
from megarl.models.hf_checkpoint import HFReader, region
from megarl.models.hf_folder import (
    HEAD,
    INDEX_FILE,
    PROCESSOR_FILE,
    SCORE,
    SCORE_BIAS,
    SINGLE_FILE,
    ModelFolder,
    file_shapes,
    name_in_file,
    stacked_parts,
    tensor_entries,
)
from megarl.models.model_config import VALUE_MODELS, ModelConfig
from megarl.models.partition import LocalParam, Piece
from megarl.models.registry import known_architectures
from megarl.models.verification import Coverage

COPIED_FILES = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    PROCESSOR_FILE,
    "video_preprocessor_config.json",
    "processor_config.json",
    GENERATION_FILE,
)
"""Files copied from the source folder of a model; weights and config are written separately."""

NO_FILES: Mapping[str, str] = {}

_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes, by their safetensors names, in which a checkpoint may store weights that the model keeps in float32."""

_BARE = "Model"


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files of :data:`COPIED_FILES` from ``source``, including folders of chat templates; raises OSError."""
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
            elif path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)


def write_companions(
    folder: Path, config: Mapping[str, Any], copy_from: str | Path | None, texts: Mapping[str, str] = NO_FILES
) -> set[str]:
    """Write config and tokenizer into a checkpoint, so that it can be converted without the original model.

    Args:
        folder: created if missing; its parent exists.
        copy_from: source of the tokenizer files; None = no copies.

    Returns:
        Paths of its files, relative to its parent, flushed to disk.

    Raises:
        OSError: reading or writing failed.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if copy_from is not None and Path(copy_from).is_dir():
        copy_companions(Path(copy_from), folder)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in [*files, folder]:
        flush_path(path)
    return {path.relative_to(folder.parent).as_posix() for path in files}


def exported_config(config: ModelConfig, tensors: Collection[str], dtype: torch.dtype | None) -> dict[str, Any]:
    """Build the ``config.json`` of exported weights, with the architecture that loads them.

    A language model that got a scalar head becomes a token classification model with one label, the usual form of a
    critic, or a sequence classification model if the family has no other. A model that had a scalar head keeps its
    architecture. Weights without any head become the bare model.

    Args:
        dtype: dtype of most elements; None if no tensor is written.
    """
    raw = with_multi_token_layers(config.raw, config, tensors)
    if SCORE not in tensors:
        complete = config.tie_word_embeddings or HEAD in tensors
        bare = config.architecture_with(_BARE)
        raw["architectures"] = [config.language_architecture if complete else bare]
    elif HEAD not in tensors:
        if not config.is_value_model:
            names = [config.architecture_with(kind) for kind in reversed(VALUE_MODELS)]
            raw["architectures"] = [next((name for name in names if name in known_architectures()), names[-1])]
        raw["id2label"], raw["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    # transformers 4 reads torch_dtype, transformers 5 either.
    names = [name for name in ("dtype", "torch_dtype") if name in raw] or ["torch_dtype"]
    return raw | dict.fromkeys(names, str(dtype).removeprefix("torch."))


def needs_head_bias(exported: dict[str, Any]) -> bool:
    """Return whether the architecture of an exported config has a bias on its scalar head."""
    architecture: str = exported["architectures"][0]
    return architecture.endswith(VALUE_MODELS[1]) and bool(exported.get("token_classification_bias", True))


class HFWriter:
    """Stream an export: write a shard file, and free its memory, as soon as its tensors are complete.

    A value head on a language model is exported as a token classification model with a zero bias
    (:func:`exported_config`). Multi-token prediction layers and a frozen vision tower are copied unchanged
    (:mod:`megarl.models.carried_tensors`).

    A context manager. All files go to a hidden folder next to ``path``, which is renamed if the block succeeds and
    removed if it fails, so ``path`` is never incomplete.

    Args:
        config: the model; see :func:`exported_config`.
        shapes: the tensors to write, from :meth:`WeightMap.hf_shapes`.
        float32: names of the tensors that arrive in float32 with every weight dtype. They are written in the dtype of
            ``copy_from`` if it holds their values exactly.
        max_shard_bytes: size limit of a shard file.
        copy_from: the initial model folder, source of tokenizer, chat template, generation config and carried tensors;
            None = no copies.
        overwrite: replace an existing ``path``; a reader sees the old folder or the new one.

    Raises:
        CheckpointError: ``path`` exists and ``overwrite`` is off; at the end of the block, if an element of a tensor
            is missing.
        ModelError: ``copy_from`` lacks the vision tower.
        ExportError: a file cannot be written; in every method.
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
        files: Mapping[str, str] = NO_FILES,
    ) -> None:
        self.path = Path(path)
        self._config = config
        self._parts = stacked_parts(config)
        self._shapes = file_shapes(shapes, self._parts)
        # Megatron's scalar head has no bias; transformers' heads of token classification do.
        exported = exported_config(config, shapes, None)
        self._adds_bias = SCORE in shapes and SCORE_BIAS not in shapes and needs_head_bias(exported)
        if self._adds_bias:
            self._shapes[SCORE_BIAS] = (1,)
        self._float32 = frozenset(float32)
        self._max_shard_bytes = max_shard_bytes
        self._copy_from = Path(copy_from) if copy_from is not None else None
        self._carried = carried_tensors(self._copy_from, config, self._shapes)
        self._shapes |= {name: entry.shape for name, entry in self._carried.items()}
        stored = {} if self._copy_from is None or not self._float32 else tensor_entries(self._copy_from)
        self._narrow = {name: entry.dtype for name, entry in stored.items() if name in self._float32}
        self._overwrite = overwrite
        self._files = dict(files)
        self._folder = self.path.parent / f".{self.path.name}.{uuid.uuid4().hex[:8]}.tmp"
        self._dtype: torch.dtype | None = None
        self._nbytes = 0  # of the written tensors
        self._shard_of: dict[str, int] = {}
        self._unwritten: list[set[str]] = []  # by shard, the incomplete tensors
        self._assemblies: dict[str, tuple[Tensor, Coverage]] = {}

    def __enter__(self) -> HFWriter:
        restore_replaced_folder(self.path)
        if self.path.exists() and not self._overwrite:
            text = f"{self.path} exists already; remove it or choose another folder for the export"
            raise CheckpointError(text, code="checkpoint.export-exists")
        with self._writing():
            self._folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, param: LocalParam, tensor: Tensor) -> None:
        """Add all pieces of a local parameter (:meth:`WeightMap.export_params`); errors as in :meth:`add_piece`."""
        if tuple(tensor.shape) != param.shape:
            text = f"parameter '{param.name}' has shape {list(tensor.shape)}, expected {list(param.shape)}"
            raise CheckpointError(text, code="checkpoint.export-shape")
        for piece in param.pieces:
            self.add_piece(piece, region(tensor, piece.at, piece.shape))

    def add_piece(self, piece: Piece, values: Tensor) -> None:
        """Add one rectangle, on any device.

        Raises:
            CheckpointError: the tensor is not part of the model, the rectangle lies outside it or differs from the
                values' shape, the dtype differs from earlier tensors, or an element arrived before.
        """
        piece, values = self._in_file(piece, values)
        shape = self._shapes.get(piece.hf_name)
        if shape is None:
            text = f"tensor '{piece.hf_name}' is not part of the exported model"
            raise CheckpointError(text, code="checkpoint.export-unknown-tensor")
        if tuple(values.shape) != piece.shape:
            raise CheckpointError(
                f"tensor '{piece.hf_name}' of shape {list(shape)}: {list(values.shape)} elements do not fit at "
                f"{list(piece.start)} to {list(piece.stop)}",
                code="checkpoint.export-shape",
            )
        self._check_dtype(piece.hf_name, values.dtype)
        if piece.hf_name not in self._unwritten[self._shard_of[piece.hf_name]]:
            text = f"tensor '{piece.hf_name}': elements at {list(piece.start)} arrived twice"
            raise CheckpointError(text, code="checkpoint.export-overlap")
        if piece.hf_name not in self._assemblies:
            cover = Coverage(piece.hf_name, shape, CheckpointError)
            self._assemblies[piece.hf_name] = torch.empty(shape, dtype=values.dtype), cover
        tensor, cover = self._assemblies[piece.hf_name]
        cover.add(piece.start, piece.shape)
        region(tensor, piece.start, piece.shape).copy_(values.detach())
        if cover.written == cover.expected:
            self._complete(piece.hf_name)

    def _in_file(self, piece: Piece, values: Tensor) -> tuple[Piece, Tensor]:
        """A rectangle and its values, in the file's tensor of all experts if there is one."""
        part = self._parts.get(piece.hf_name)
        if part is None:
            return piece, values
        start = (part.expert, *piece.start[:0:-1], part.first + piece.start[0])
        stop = (part.expert + 1, *piece.stop[:0:-1], part.first + piece.stop[0])
        stacked = values.permute(*reversed(range(values.dim())))[None]
        return Piece(part.name, start, stop, start), stacked

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if not self._unwritten:
            self._assign_shards(dtype.itemsize)
        if name in self._carried:
            return
        if name in self._float32:
            if dtype is not torch.float32:
                text = f"tensor '{name}' arrived as {dtype}, but the export stores it as {torch.float32}"
                raise CheckpointError(text, code="checkpoint.export-dtype")
            return
        self._dtype = self._dtype or dtype
        if dtype != self._dtype:
            text = f"tensor '{name}' arrived as {dtype}, the tensors before it as {self._dtype}"
            raise CheckpointError(text, code="checkpoint.export-dtype")

    def _assign_shards(self, element_bytes: int) -> None:
        """Assign tensors to shards in checkpoint order; file names contain the number of shards."""
        used = 0
        for name, shape in self._shapes.items():
            nbytes = self._carried[name].nbytes if name in self._carried else prod(shape) * element_bytes
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
            names = [n for n, s in self._shard_of.items() if s == shard]
            by_name = {n: self._in_file_dtype(n, self._assemblies.pop(n)[0]) for n in names}
            tensors = {name_in_file(self._config, name): tensor for name, tensor in by_name.items()}
            self._nbytes += sum(tensor.nbytes for tensor in tensors.values())
            with self._writing():
                save_file(tensors, str(self._folder / self._file_name(shard)), metadata={"format": "pt"})

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Name the folder and the remedy if a file cannot be written."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise ExportError(
                f"{self.path} cannot be written: {error}. Free some space or choose another folder; `megarl convert` "
                "exports a checkpoint of the run",
                code="disk.export-write",
            ) from error

    def _in_file_dtype(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a float32 tensor to the narrower dtype of the source if that is exact."""
        dtype = _NARROW.get(self._narrow.get(name, ""))
        narrow = tensor if dtype is None else tensor.to(dtype)
        return narrow if torch.equal(narrow.float(), tensor.float()) else tensor

    def _file_name(self, shard: int) -> str:
        count = len(self._unwritten)
        return SINGLE_FILE if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"

    def _finish(self) -> None:
        if self._adds_bias and self._dtype is not None:
            self.add_piece(Piece(SCORE_BIAS, (0,), (1,), (0,)), torch.zeros(1, dtype=self._dtype))
        if self._unwritten:
            self._add_carried()
        missing = [name for names in self._unwritten for name in sorted(names)] if self._unwritten else [*self._shapes]
        if missing:
            raise CheckpointError(
                f"export to {self.path}: {len(missing)} tensors are incomplete, the first is '{missing[0]}'",
                code="checkpoint.export-incomplete",
            )
        if len(self._unwritten) > 1:
            placed = self._shard_of.items()
            file_of = {name_in_file(self._config, name): self._file_name(shard) for name, shard in placed}
            self._write_json(INDEX_FILE, {"metadata": {"total_size": self._nbytes}, "weight_map": file_of})
        self._write_json("config.json", exported_config(self._config, self._shapes, self._dtype))
        if self._copy_from is not None:
            copy_companions(self._copy_from, self._folder)
        for name, text in self._files.items():
            (self._folder / name).write_text(text, encoding="utf-8")
        for path in [*self._folder.rglob("*"), self._folder]:
            flush_path(path)
        replace_folder(self._folder, self.path)

    def _add_carried(self) -> None:
        """Copy the carried tensors."""
        reader = HFReader(ModelFolder(self._copy_from or Path(), self._config, self._carried))
        for name, entry in self._carried.items():
            zeros = (0,) * len(entry.shape)
            piece = Piece(name, zeros, entry.shape, zeros)
            self.add_piece(piece, reader.read(piece))

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
