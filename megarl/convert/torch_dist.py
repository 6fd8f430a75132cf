"""Reads ``torch_dist`` checkpoints of Megatron-Core's GPT models, in whatever layout another program saved them.

Such a checkpoint holds each parameter once, whole, under Megatron's name: what tensor-parallel rank 0 of 1 would hold.
So the weight map's description of an unsplit model tells where each Hugging Face tensor is. Only the ways in which
names differ are told here: all layers, or all experts of a layer, may lie in one tensor, one behind the other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megarl.checkpoint_index import read_index
from megarl.convert.source import TORCH_DIST, Source, stored_tensors, without_head_bias
from megarl.convert.stored import Part, StoredTensor, TensorView
from megarl.errors import CheckpointError
from megarl.models import LocalParam, ModelConfig, ParallelLayout, Piece, WeightMap, canonical_name

_PREFIX = re.compile(r"^(?:module\.|model\d*\.|actor\.)+")
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.|^(?:rng_state|rerun_state_machine_state|opt_param_scheduler)")
_EXTRA = re.compile(r"(?:^|\.)_extra_state(?:/|$)")
_LAYERS = "decoder.layers."
_EXPERTS = re.compile(r"\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12])\.")
_LATENT_NORMS = {
    ".linear_q_up_proj.layer_norm_weight": ".q_layernorm.weight",
    ".linear_kv_up_proj.layer_norm_weight": ".kv_layernorm.weight",
}
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_HALVES = {"_w": 0, "_v": 1}  # gate and up of a fused layer, where they were saved apart


class _Located(NamedTuple):
    """Rows from ``row`` on of a Megatron parameter: ``stored[leading]``."""

    stored: StoredTensor
    leading: tuple[int, ...]
    row: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.leading) :]


def open_torch_dist(path: Path, config: ModelConfig, companions: Path) -> Source:
    """Opens a checkpoint.

    Args:
        path: the folder with ``.metadata``.
        config: the model.
        companions: folder with the model's config and tokenizer.

    Raises:
        CheckpointError: a file is missing or truncated, or the parameters are not those of the model.
    """
    index = read_index(path)
    names = [name for name in index.state_dict_metadata if not _STATE.search(name) and not _EXTRA.search(name)]
    stored = stored_tensors(path, index, names)
    located = _locate_all(path, stored)
    heads = located.get(_OUTPUT, [])
    value_head = bool(heads) and heads[0].shape[0] == 1
    has_bias = "output_layer.bias" in located
    weight_map = WeightMap(config if has_bias or not value_head else without_head_bias(config), value_head)
    params = weight_map.megatron_params(ParallelLayout(), 0)
    parts: dict[str, list[Part]] = defaultdict(list)
    for param in params:
        found = _checked(path, param, located.pop(param.name, []), weight_map, companions)
        for piece in param.pieces:
            parts[piece.hf_name].append(_part(piece, found))
    shapes = weight_map.hf_shapes()
    views = {n: TensorView(n, shape, parts[n][0].stored.dtype, tuple(parts[n])) for n, shape in shapes.items()}
    left_out = tuple(sorted({place.stored.name for places in located.values() for place in places}))
    state = sorted({name.partition(".")[0] for name in index.state_dict_metadata if _STATE.search(name)})
    source = Source(path, TORCH_DIST, config, companions, views, left_out, tuple(state), _facts(stored, config))
    source.check_files()
    return source


def _facts(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, str]:
    rows = [t.shape[0] for n, t in stored.items() if n.endswith("word_embeddings.weight")]
    return {"vocabulary": f"{config.vocab_size} of {rows[0]} rows"} if rows else {}


def _locate_all(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, list[_Located]]:
    """By the weight map's name, the stored tensors that a parameter consists of."""
    result: dict[str, list[_Located]] = defaultdict(list)
    for name, tensor in stored.items():
        try:
            for full, index, row in _names(_PREFIX.sub("", name), tensor.shape):
                result[full].append(_Located(tensor, index, row))
        except IndexError:
            raise CheckpointError(
                f"checkpoint {path}: '{name}' of shape {list(tensor.shape)} lacks a dimension"
            ) from None
    for places in result.values():
        places.sort(key=lambda place: place.row)
    return result


def _names(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """The parameters in a stored tensor: name, index of its leading dimensions, first row."""
    half = next((h for suffix, h in _HALVES.items() if name.endswith(f".weight{suffix}")), 0)
    name = re.sub(r"\.weight_[wv]$", ".weight", name)
    for fused, plain in _LATENT_NORMS.items():
        name = name.replace(fused, plain)
    layers: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    if name.startswith(_LAYERS) and not name.removeprefix(_LAYERS)[0].isdigit():
        layers = [(f"{_LAYERS}{n}.{name.removeprefix(_LAYERS)}", (n,)) for n in range(shape[0])]
    for full, index in layers:
        experts = _EXPERTS.search(full)
        if experts is None:
            yield canonical_name(full), index, half * shape[len(index)]
            continue
        numbers = [(int(experts[1]), index)] if experts[1] else [(n, (*index, n)) for n in range(shape[len(index)])]
        for number, place in numbers:
            local = _EXPERTS.sub(rf".experts.local_experts.{number}.\2.", full)
            yield local, place, half * shape[len(place)]


def _checked(
    path: Path, param: LocalParam, found: list[_Located], weight_map: WeightMap, companions: Path
) -> list[_Located]:
    """The stored tensors of a parameter, if they are all of it; a vocabulary may have any padding."""
    if not found:
        raise CheckpointError(f"checkpoint {path} lacks '{param.name}' of the model of {companions}/config.json")
    height, rest = sum(place.shape[0] for place in found), {place.shape[1:] for place in found}
    vocab = param.name == _EMBEDDING or (param.name == _OUTPUT and not weight_map.value_head)
    least = weight_map.config.vocab_size if vocab else param.shape[0]
    if rest != {param.shape[1:]} or height < least or (height != least and not vocab):
        names = " and ".join(f"'{place.stored.name}' {list(place.shape)}" for place in found)
        raise CheckpointError(
            f"checkpoint {path}: {names}; by {companions}/config.json '{param.name}' has shape "
            f"{[least, *param.shape[1:]]}"
        )
    return found


def _part(piece: Piece, found: list[_Located]) -> Part:
    """Where a rectangle of a parameter is stored."""
    row, *rest = piece.at
    place = [p for p in found if p.row <= row][-1]
    return Part(piece.start, piece.stop, place.stored, (*place.leading, row - place.row, *rest))
