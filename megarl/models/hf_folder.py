"""Check a Hugging Face model folder by its file headers, without torch or weights, and identify its model.

A file may stack a matrix or bias of all experts of a layer. The weight map has one tensor per expert. Families that
declare it are published, and exported, with the other dimensions reversed: ``[experts, inputs, outputs]`` in the file
for ``[outputs, inputs]``, in MXFP4 or not; gates and up projections may be side by side. Other files may have
transformers' own tensors, ``[experts, outputs, inputs]`` with the gates above the up projections, as Qwen3.5 is
published; exports of families that do not declare stacked tensors have one per expert.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from megarl.base.errors import ModelError
from megarl.base.json_text import parse_json, read_json_object
from megarl.models.hf_config import read_model_config
from megarl.models.model_config import VALUE_MODELS, Experts, ModelConfig
from megarl.models.registry import count, family_of, json_object
from megarl.models.weight_map import WeightMap, dimension_sizes

SINGLE_FILE = "model.safetensors"
PROCESSOR_FILE = "preprocessor_config.json"
"""Settings of the image processor."""
INDEX_FILE = "model.safetensors.index.json"
HEAD, SCORE, SCORE_BIAS = "lm_head.weight", "score.weight", "score.bias"
EMBEDDING = "model.embed_tokens.weight"
HEADS = (HEAD, SCORE, SCORE_BIAS)
"""Tensors after the last norm, over all kinds of models."""
_COMPARED_BYTES = 2**24
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of ``config.json`` that do not describe the model."""
BLOCK = 32
"""Neighbouring inputs that share a scale in MXFP4."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that hold a matrix in MXFP4."""
NESTED = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Starts of names in files that nest decoder and vision tower, with those of the weight map."""
_HEAD_ALIASES = {"classifier.weight": SCORE, "classifier.bias": SCORE_BIAS}
"""Alternative names of the scalar head in checkpoints, with the names of the weight map."""


class TensorEntry(NamedTuple):
    """Location and header entry of a stored tensor.

    Attributes:
        dtype: safetensors' name, such as ``BF16``.
        stored_as: the tensor's name in the file, if it differs.
        offset: first byte of its elements in the file.
        expert: its index in the file's tensor of all experts; None without such a tensor.
        first_row: its first row there.
        is_reversed: whether the other dimensions are in reverse order there.
        whole: the file's tensor of all experts.
        scales: the file's scales of all experts, if ``whole`` has blocks in MXFP4; elements are then read as ``BF16``.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    stored_as: str = ""
    offset: int = 0
    nbytes: int = 0
    expert: int | None = None
    first_row: int = 0
    is_reversed: bool = False
    whole: TensorEntry | None = None
    scales: TensorEntry | None = None


@dataclass(frozen=True)
class ModelFolder:
    """A checked model folder."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]


def check_model_folder(path: str | Path, *, may_lack_head: bool = False) -> ModelFolder:
    """Check that a folder contains a complete model: config, every shard, every tensor of the right shape.

    It reads only JSON headers, and a stored output layer that is tied.

    Args:
        may_lack_head: the output layer, or the scalar head of a value model, may be absent.

    Raises:
        ModelError: a file or tensor is missing, truncated or of the wrong shape, or a tied output layer is not the
            embedding; names it.
    """
    folder = Path(path)
    config = read_model_config(folder, may_be_bare=may_lack_head)
    entries = tensor_entries(folder, required=True)
    for alias, name in _HEAD_ALIASES.items():  # of a scalar head
        if alias in entries and name not in entries:
            entries[name] = entries.pop(alias)._replace(stored_as=alias)
    tensors = _by_expert(entries, config)
    for name, shape in WeightMap(config, value_head=config.is_value_model).hf_shapes().items():
        if name not in tensors:
            if may_lack_head and name in HEADS:
                continue
            text = f"model folder {folder} lacks tensor '{name}' of shape {list(shape)}"
            raise ModelError(text, code="model.missing-tensor")
        if name != SCORE:
            _check_shape(tensors[name], name, shape)
    if SCORE in tensors:
        _check_scalar_head(tensors, config)
    check_tower(folder, config, tensors)
    if config.tie_word_embeddings and HEAD in tensors and not equal_values(tensors[HEAD], tensors[EMBEDDING]):
        raise ModelError(
            f"{tensors[HEAD].file}: tensor '{HEAD}' differs from '{EMBEDDING}', but {folder / 'config.json'} has "
            f"tie_word_embeddings=true, with which '{HEAD}' has no effect; set tie_word_embeddings=false there to use "
            "it, as transformers does, or remove the tensor",
            code="model.tied-head-differs",
        )
    return ModelFolder(folder, config, tensors)


def is_tower(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor belongs to the vision tower."""
    return config.vision is not None and name.startswith(config.vision.prefix)


def check_tower(folder: Path | str, config: ModelConfig, tensors: Iterable[str]) -> None:
    """Check that a model's frozen vision tower is there, with the same tensors in each of its blocks.

    A job checks all names and shapes (:func:`megarl.models.tower_class.check_tower_shapes`), which needs torch.

    Raises:
        ModelError: the tower, or a tensor of a block, is missing; names it.
    """
    if config.vision is None or config.trains_tower:
        return
    prefix, depth = config.vision.prefix, count(config.vision.settings, "depth")
    blocks: dict[str, set[str]] = {f"{prefix}blocks.{number}.": set() for number in range(depth)}
    for name in tensors:
        match = re.match(rf"{re.escape(prefix)}blocks\.\d+\.", name)
        if match is not None:
            blocks.setdefault(match[0], set()).add(name.removeprefix(match[0]))
    every = set[str]().union(*blocks.values()) or {""}
    lacking = [block + part for block, parts in blocks.items() for part in sorted(every - parts)]
    if lacking:
        text = f"model folder {folder} lacks tensors of the vision tower of {config.architecture}: '{lacking[0]}'"
        raise ModelError(f"{text}; copy the weights of the original model there", code="model.vision-tower")


def image_grid(path: str | Path) -> dict[str, Any]:
    """Return the settings of a folder's image processor that decide the number of an image's tokens.

    They are None in a folder without an image processor.
    """
    file = Path(path) / PROCESSOR_FILE
    raw = read_json_object(file, ModelError) if file.is_file() else {}
    size = json_object(raw, "size")
    pixels = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    return {name: raw.get(name, value) for name, value in {"patch_size": None, "merge_size": None, **pixels}.items()}


def equal_values(first: TensorEntry, second: TensorEntry) -> bool:
    """Return whether two stored tensors have the same shape and elements; formats up to 32 bits may differ."""
    if first.shape != second.shape:
        return False
    read = (lambda values, _: values) if first.dtype == second.dtype else _as_float32
    with first.file.open("rb") as file, second.file.open("rb") as other:
        file.seek(first.offset)
        other.seek(second.offset)
        elements = max(1, math.prod(first.shape))
        widths = first.nbytes // elements, second.nbytes // elements
        for start in range(0, elements, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, elements - start)
            values, others = file.read(size * widths[0]), other.read(size * widths[1])
            if read(values, first.dtype) != read(others, second.dtype):
                return False
    return True


def _as_float32(values: bytes, dtype: str) -> bytes:
    """Convert elements to float32; those of other formats than float16, bfloat16 and float32 are returned unchanged."""
    import numpy as np  # most readers of headers need none

    if dtype == "BF16":
        return (np.frombuffer(values, "<u2").astype("<u4") << 16).tobytes()
    return np.frombuffer(values, "<f2").astype("<f4").tobytes() if dtype == "F16" else values


def _by_expert(tensors: dict[str, TensorEntry], config: ModelConfig) -> dict[str, TensorEntry]:
    """Replace tensors of a layer's experts by one entry per expert, under the weight map's names."""
    parts = stacked_parts(config)
    if not parts:
        if config.experts is not None:
            _split_experts(tensors, config, config.experts)
        return tensors
    shapes = WeightMap(config).hf_shapes()
    stacked = file_shapes(shapes, parts)
    # The shape of a square matrix, and of a bias, does not show the order of dimensions.
    is_ambiguous = any(stacked[part.name][1] == stacked[part.name][-1] for part in parts.values())
    for name, part in parts.items():
        if part.name in tensors:
            whole, reverse = tensors[part.name], stacked[part.name]
            if is_ambiguous or whole.shape != (reverse[0], *reverse[:0:-1]):
                _check_shape(whole, part.name, reverse)
            tensors[name] = _expert_entry(whole, part, shapes[name], is_reversed=whole.shape == reverse)
        elif part.name + BLOCKS in tensors and part.name + SCALES in tensors:
            tensors[name] = _mxfp4_entry(tensors[part.name + BLOCKS], tensors[part.name + SCALES], part, config)
    for name in {part.name for part in parts.values()}:
        for suffix in ("", BLOCKS, SCALES):
            tensors.pop(name + suffix, None)
    return tensors


def _split_experts(tensors: dict[str, TensorEntry], config: ModelConfig, experts: Experts) -> None:
    """Replace transformers' tensors of all experts of a decoder layer by one entry per matrix."""
    shapes = {
        "gate_up_proj": (experts.count, 2 * experts.ffn_hidden_size, config.hidden_size),
        "down_proj": (experts.count, config.hidden_size, experts.ffn_hidden_size),
    }
    for name in [name for name in tensors if re.fullmatch(r"model\.layers\..*\.experts\.(gate_up|down)_proj", name)]:
        whole, (block, _, kind) = tensors.pop(name), name.rpartition(".")
        _check_shape(whole, name, shapes[kind])
        matrices = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        rows = whole.shape[1] // len(matrices)
        for expert in range(experts.count):
            for number, matrix in enumerate(matrices):
                part, shape = StackedPart(name, expert, number * rows), (rows, whole.shape[2])
                tensors[f"{block}.{expert}.{matrix}.weight"] = _expert_entry(whole, part, shape, is_reversed=False)


def _expert_entry(whole: TensorEntry, part: StackedPart, shape: tuple[int, ...], *, is_reversed: bool) -> TensorEntry:
    """Locate an expert's tensor of ``shape``; with reversed dimensions, tensors side by side have the same bytes."""
    nbytes = whole.nbytes // whole.shape[0]
    row = 0 if is_reversed else nbytes // whole.shape[1]
    return whole._replace(
        shape=shape,
        stored_as=whole.stored_as or part.name,
        offset=whole.offset + part.expert * nbytes + part.first * row,
        nbytes=shape[0] * row or nbytes,
        expert=part.expert,
        first_row=part.first,
        is_reversed=is_reversed,
        whole=whole,
    )


def _mxfp4_entry(blocks: TensorEntry, scales: TensorEntry, part: StackedPart, config: ModelConfig) -> TensorEntry:
    assert config.experts is not None
    if blocks.shape[:1] != (config.experts.count,):
        raise ModelError(
            f"{blocks.file}: tensor '{part.name}{BLOCKS}' has shape {list(blocks.shape)}, config.json implies "
            f"{config.experts.count} experts",
            code="model.tensor-shape",
        )
    if (blocks.dtype, scales.dtype) != ("U8", "U8") or blocks.shape != (*scales.shape, BLOCK // 2):
        raise ModelError(
            f"{blocks.file}: '{part.name}{BLOCKS}' is {blocks.dtype} of shape {list(blocks.shape)}, its scales "
            f"{scales.dtype} of shape {list(scales.shape)}; MXFP4 has U8, and {BLOCK // 2} bytes for each scale",
            code="model.mxfp4-layout",
        )
    shape = (*scales.shape[1:-1], scales.shape[-1] * BLOCK)
    return _expert_entry(blocks, part, shape, is_reversed=True)._replace(
        dtype="BF16",
        stored_as=blocks.stored_as or part.name + BLOCKS,
        scales=scales._replace(stored_as=scales.stored_as or part.name + SCALES),
    )


def _check_scalar_head(tensors: Mapping[str, TensorEntry], config: ModelConfig) -> None:
    """Reject a head with several labels, and a bias that the architecture does not have."""
    entry = tensors[SCORE]
    if entry.shape[:1] != (1,) and entry.shape[1:] == (config.hidden_size,):
        raise ModelError(
            f"{entry.file}: the head '{entry.stored_as or SCORE}' of {config.architecture} has {entry.shape[0]} "
            "labels; a value or reward model has one (num_labels=1)",
            code="model.head-labels",
        )
    _check_shape(entry, SCORE, (1, config.hidden_size))
    if SCORE_BIAS in tensors and config.is_value_model and not config.has_head_bias:
        bias = tensors[SCORE_BIAS]
        raise ModelError(
            f"{bias.file}: tensor '{bias.stored_as or SCORE_BIAS}' would be dropped: the head of "
            f"{config.architecture} has no bias, here and in transformers; remove it (it shifts all scores equally) "
            f"or name the architecture {config.architecture_with(VALUE_MODELS[1])}",
            code="model.head-bias",
        )


def _check_shape(entry: TensorEntry, name: str, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        text = f"{entry.file}: tensor '{name}' has shape {list(entry.shape)}, config.json implies {list(shape)}"
        raise ModelError(text, code="model.tensor-shape")


def tensor_entries(folder: Path, *, required: bool = False) -> dict[str, TensorEntry]:
    """Return a folder's tensors by name, also those outside the model; empty without weights or folder.

    Names are those of the weight map, in folders that nest them (:data:`NESTED`), too.

    Raises:
        ModelError: a weight file is missing or damaged, a tensor is there under two names, or there is no weight file
            and weights are ``required``.
    """
    entries = _stored_entries(folder, required=required)
    named: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        plain = plain_name(name)
        if plain in named:
            text = f"{entry.file}: '{name}' and '{named[plain].stored_as or plain}' are names of one tensor"
            raise ModelError(f"{text}; remove one", code="model.tensor-twice")
        named[plain] = entry if plain == name else entry._replace(stored_as=name)
    return named


def plain_name(name: str) -> str:
    """Return a tensor's name without the nesting of :data:`NESTED`."""
    nested = next((start for start in NESTED if name.startswith(start)), "")
    return NESTED.get(nested, "") + name.removeprefix(nested)


def nested_name(name: str) -> str:
    """Return a tensor's name with the nesting of :data:`NESTED`; the output layer has none."""
    nested = next((start for start, plain in NESTED.items() if name.startswith(plain)), "")
    return nested + name.removeprefix(NESTED.get(nested, ""))


def name_in_file(config: ModelConfig, name: str) -> str:
    """Return the name that an exported file has for a tensor of the weight map."""
    return nested_name(name) if config.vision is not None and config.vision.nested else name


def _stored_entries(folder: Path, *, required: bool) -> dict[str, TensorEntry]:
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return read_header(folder / SINGLE_FILE)
        if not required:
            return {}
        text = f"model folder {folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
        raise ModelError(text, code="model.no-weights")
    file_of = read_json_object(index, ModelError).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to file names", code="model.malformed-index")
    shards: dict[str, dict[str, TensorEntry]] = {}
    for file in dict.fromkeys(file_of.values()):
        if not os.path.isfile(folder / file):  # noqa: PTH113 - false for a name that no file can have; Path raises
            text = f"model folder {folder} lacks shard '{file}', which {INDEX_FILE} names"
            raise ModelError(text, code="model.missing-shard")
        shards[file] = read_header(folder / file)
    for name, file in file_of.items():
        if name not in shards[file]:
            text = f"{folder / file} lacks tensor '{name}', which {INDEX_FILE} places there"
            raise ModelError(text, code="model.index-mismatch")
    return {name: shards[file][name] for name, file in file_of.items()}


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file: its length in eight little-endian bytes, then JSON, then the data.

    Raises:
        ModelError: the file cannot be read, is truncated, or is no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= size - 8:
                text = f"{file} is truncated or not a safetensors file ({size} bytes)"
                raise ModelError(text, code="model.truncated-file")
            header = parse_json(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}", code="model.unreadable-file") from None
    except ValueError as error:
        raise ModelError(f"{file} is not a safetensors file: {error}", code="model.not-safetensors") from None
    if not isinstance(header, dict):
        text = f"{file} is not a safetensors file: its header holds a {type(header).__name__}"
        raise ModelError(text, code="model.not-safetensors")
    header.pop("__metadata__", None)
    entries = {name: _header_entry(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + length)
    if size != end:
        raise ModelError(f"{file} is truncated: {size} bytes, its header describes {end}", code="model.truncated-file")
    return entries


def _header_entry(file: Path, name: str, entry: Any, first: int) -> TensorEntry:
    """Check the types of a tensor's entry in the header; ``first`` is the first byte of the data."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, *lists = (fields.get(field, ()) for field in ("dtype", "shape", "data_offsets"))
    are_counts = all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in lists)
    shape, offsets = lists
    is_named = isinstance(dtype, str) and dtype.isascii()
    if not (is_named and are_counts and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise ModelError(
            f"{file} is not a safetensors file: tensor '{name:.80}' has the entry {entry!r:.120}, expected dtype, "
            "shape and data_offsets; download the file again",
            code="model.not-safetensors",
        )
    return TensorEntry(file, tuple(shape), dtype, offset=first + offsets[0], nbytes=offsets[1] - offsets[0])


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a model folder; two folders with the same weights have equal digests wherever they are.

    Attributes:
        settings: digest of ``config.json``.
        weights: digest of every tensor's name, shape and dtype, and of samples of its bytes.
    """

    path: str
    settings: str
    weights: str

    def difference(self, other: ModelIdentity) -> str | None:
        """Return the field that differs from another model's; None for the same model."""
        return next((part for part in ("settings", "weights") if getattr(self, part) != getattr(other, part)), None)


def identify_model(path: str | Path) -> ModelIdentity:
    """Identify a Hugging Face folder.

    It reads up to 64 KiB of each tensor at evenly spaced offsets: training changes elements everywhere. The digest does
    not depend on the division into files.

    Raises:
        ModelError: the folder is incomplete.
    """
    folder = check_model_folder(path, may_lack_head=True)
    weights = hashlib.blake2b(digest_size=16)
    for name, entry in sorted(folder.tensors.items()):
        weights.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        with entry.file.open("rb") as file:
            last = entry.nbytes - _SAMPLE_BYTES
            samples = [(last * n // (_SAMPLES - 1), _SAMPLE_BYTES) for n in range(_SAMPLES)]
            for start, size in samples if entry.nbytes > _SAMPLES * _SAMPLE_BYTES else [(0, entry.nbytes)]:
                file.seek(entry.offset + start)
                weights.update(file.read(size))
    described = {key: value for key, value in folder.config.raw.items() if key not in _VOLATILE}
    settings = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=16)
    return ModelIdentity(str(Path(path).absolute()), settings.hexdigest(), weights.hexdigest())


class StackedPart(NamedTuple):
    """Place of an expert's tensor: the file's tensor, and the expert and the first row in it."""

    name: str
    expert: int
    first: int


def stacked_parts(config: ModelConfig) -> dict[str, StackedPart]:
    """Return each expert tensor's place in a file's stacked tensors, by name; empty if files do not stack them."""
    if config.experts is None:
        return {}
    stacked = [declared for declared in family_of(config.architecture).layer if declared.hf[0].stacked]
    sizes = dimension_sizes(config)
    return {
        tensor.name.format(layer=layer, expert=expert): StackedPart(tensor.stacked.format(layer=layer), expert, first)
        for layer in range(config.num_layers)
        for declared in stacked
        if declared.when is None or declared.when(config, layer)
        for tensor, first in zip(
            declared.hf, accumulate((sizes[str(t.dims[0])] for t in declared.hf), initial=0), strict=False
        )
        for expert in range(config.experts.count)
    }


def file_shapes(shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, StackedPart]) -> dict[str, tuple[int, ...]]:
    """Return a file's tensor shapes from those of the weight map, in the same order; ``parts`` stacks experts."""
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        part = parts.get(name)
        if part is None:
            result[name] = shape
        else:
            result[part.name] = (part.expert + 1, *shape[:0:-1], part.first + shape[0])
    return result
