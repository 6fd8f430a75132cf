"""Reader of ``torch_dist`` checkpoints: GPT models of Megatron-Core, saved by other programs in any layout.

Such a checkpoint stores each parameter once and unsplit, under its Megatron name, as rank 0 of TP 1 holds it. The
weight map of an unsplit model therefore gives the location of each Hugging Face tensor. This module only translates
names: all layers, or all experts of a layer, may be stacked in one tensor. Megatron's own loader would build the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megarl.base.checkpoint_files import read_index
from megarl.base.errors import CheckpointError
from megarl.convert.source import TORCH_DIST, CheckpointSource, stored_tensors, without_head_bias
from megarl.convert.stored import StoredTensor, TensorView, ViewRegion
from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap, canonical_name
from megarl.models.hf_folder import stacked_parts

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
_HALVES = {"_w": 0, "_v": 1}  # gate and up of a fused layer, if saved separately


class _Located(NamedTuple):
    """Rows of a Megatron parameter, starting at ``row``: ``stored[leading]``."""

    stored: StoredTensor
    leading: tuple[int, ...]
    row: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.leading) :]


def open_torch_dist(path: Path, config: ModelConfig, companions: Path) -> CheckpointSource:
    """Open a checkpoint, with config and tokenizer in the folder ``companions``.

    Raises:
        CheckpointError: a file is missing or truncated, or the parameters do not fit the model.
    """
    if stacked_parts(config):
        raise CheckpointError(
            f"checkpoint {path}: a torch_dist checkpoint of {config.architecture} cannot be read: other programs order "
            "the rows of its experts differently; use its Hugging Face export",
            code="convert.torch-dist-experts",
        )
    index = read_index(path)
    names = [name for name in index.state_dict_metadata if not _STATE.search(name) and not _EXTRA.search(name)]
    stored = stored_tensors(path, index, names)
    located = _locate_all(path, stored)
    heads = located.get(_OUTPUT, [])
    value_head = bool(heads) and heads[0].shape[0] == 1
    has_bias = "output_layer.bias" in located
    weight_map = WeightMap(config if has_bias or not value_head else without_head_bias(config), value_head)
    params = weight_map.megatron_params(ParallelLayout(), 0)
    regions: dict[str, list[ViewRegion]] = defaultdict(list)
    for param in params:
        located_rows = _check_rows(path, param, located.pop(param.name, []), weight_map, companions)
        for piece in param.pieces:
            row, *columns = piece.at
            place = [p for p in located_rows if p.row <= row][-1]
            at = (*place.leading, row - place.row, *columns)
            regions[piece.hf_name].append(ViewRegion(piece.start, piece.stop, place.stored, at))
    shapes = weight_map.hf_shapes()
    views = {n: TensorView(n, shape, regions[n][0].stored.dtype, tuple(regions[n])) for n, shape in shapes.items()}
    left_out = tuple(sorted({location.stored.name for locations in located.values() for location in locations}))
    state = sorted({name.partition(".")[0] for name in index.state_dict_metadata if _STATE.search(name)})
    rows = [t.shape[0] for n, t in stored.items() if n.endswith("word_embeddings.weight")]
    vocabulary = {"vocabulary": f"{config.vocab_size} of {rows[0]} rows"} if rows else {}
    source = CheckpointSource(path, TORCH_DIST, config, companions, views, left_out, tuple(state), vocabulary)
    source.check_files()
    return source


def _locate_all(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, list[_Located]]:
    """Return the stored tensors of each parameter, by its name in the weight map."""
    result: dict[str, list[_Located]] = defaultdict(list)
    for name, tensor in stored.items():
        try:
            for full, index, row in _names(_PREFIX.sub("", name), tensor.shape):
                result[full].append(_Located(tensor, index, row))
        except IndexError:
            text = f"checkpoint {path}: '{name}' of shape {list(tensor.shape)} lacks a dimension"
            raise CheckpointError(text, code="convert.config-mismatch") from None
    for locations in result.values():
        locations.sort(key=lambda location: location.row)
    return result


def _names(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield the parameters in a stored tensor: name, index of its leading dimensions, first row."""
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
        for number, leading in numbers:
            local = _EXPERTS.sub(rf".experts.local_experts.{number}.\2.", full)
            yield local, leading, half * shape[len(leading)]


def _check_rows(
    path: Path, param: LocalParam, located: list[_Located], weight_map: WeightMap, companions: Path
) -> list[_Located]:
    """Return the stored tensors of a parameter after checking their shapes; the vocabulary may have any padding."""
    if not located:
        text = f"checkpoint {path} lacks '{param.name}' of the model of {companions}/config.json"
        raise CheckpointError(text, code="convert.config-mismatch")
    height, row_shapes = sum(location.shape[0] for location in located), {location.shape[1:] for location in located}
    vocab = param.name == _EMBEDDING or (param.name == _OUTPUT and not weight_map.value_head)
    minimum = weight_map.config.vocab_size if vocab else param.shape[0]
    if row_shapes != {param.shape[1:]} or height < minimum or (height != minimum and not vocab):
        names = " and ".join(f"'{location.stored.name}' {list(location.shape)}" for location in located)
        raise CheckpointError(
            f"checkpoint {path}: {names}; by {companions}/config.json '{param.name}' has shape "
            f"{[minimum, *param.shape[1:]]}",
            code="convert.config-mismatch",
        )
    return located
