"""Detection and opening of checkpoints: Hugging Face folders, megarl roles and ``torch_dist`` folders.

A ``torch_dist`` checkpoint of Megatron-Core stores each parameter once and unsplit, under its Megatron name, as rank 0
of TP 1 holds it. The weight map of an unsplit model therefore gives the location of each Hugging Face tensor; only
names are translated here: all layers, or all experts of a layer, may be stacked in one tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.base.checkpoint_files import HF_FOLDER, INDEX, POINTER, read_index
from megarl.base.errors import CheckpointError, ModelError
from megarl.base.json_text import parse_json
from megarl.convert.saved_arguments import model_folders
from megarl.convert.source import (
    DTYPES,
    HUGGING_FACE,
    MEGARL,
    PEFT,
    SCORE,
    STATE_FILE,
    STATE_FORMAT,
    TORCH_DIST,
    WEIGHT,
    CheckpointSource,
    ExpertView,
    QuantizedExpertView,
    base_of_role,
    options_of_folder,
    options_of_role,
    stored_tensors,
    whole_view,
    with_base,
    without_head_bias,
)
from megarl.convert.stored import Chunk, StoredTensor, TensorView, ViewRegion
from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap, canonical_name, read_model_config
from megarl.models.carried_tensors import is_carried, unused_tensors
from megarl.models.hf_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    ModelIdentity,
    TensorEntry,
    check_model_folder,
    is_tower,
    tensor_entries,
)
from megarl.models.peft_folder import CONFIG_FILE as ADAPTER_CONFIG
from megarl.models.peft_folder import AdapterFolder
from megarl.models.tower_class import TOWER, tower_declarations

_PREFIX = re.compile(r"^(?:module\.|model\d*\.|actor\.|language_model\.)+")
_TOWER_PREFIX = re.compile(r"^(?:module\.|model\d*\.|actor\.)*(?:visual|vision_model)\.")
"""Start of the names that Megatron-Bridge gives the parameters of transformers' vision tower."""
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
CONFIG = "config.json"
ROLES = ("actor", "critic", "sft", "reward_model", "preference")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "mp_rank_00", "mp_rank_00_000")


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
    if config.experts is not None and config.experts.clamped is not None:
        raise CheckpointError(
            f"checkpoint {path}: a torch_dist checkpoint of {config.architecture} cannot be read: other programs order "
            "the rows of its experts differently; use its Hugging Face export",
            code="convert.torch-dist-experts",
        )
    index = read_index(path)
    names = [name for name in index.state_dict_metadata if not _STATE.search(name) and not _EXTRA.search(name)]
    stored = stored_tensors(path, index, names)
    config = config.with_trained_tower(any(map(_TOWER_PREFIX.match, stored)))
    _check_tower_names(path, config, stored)
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


def _check_tower_names(path: Path, config: ModelConfig, stored: Iterable[str]) -> None:
    """Check that the parameters of a vision tower are those of transformers' module."""
    declared = {} if config.vision is None else tower_declarations(config.vision)
    known = {parameter.megatron for parameter in declared}
    for name in stored:
        if (full := _TOWER_PREFIX.sub(TOWER, name)) != name and full not in known:
            raise CheckpointError(
                f"checkpoint {path}: '{name}' is not a parameter of transformers' vision tower; towers with Megatron's "
                "layers cannot be read from torch_dist: use the checkpoint's Hugging Face export",
                code="convert.torch-dist-tower",
            )


def _locate_all(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, list[_Located]]:
    """Return the stored tensors of each parameter, by its name in the weight map."""
    result: dict[str, list[_Located]] = defaultdict(list)
    for name, tensor in stored.items():
        try:
            for full, index, row in _names(_PREFIX.sub("", _TOWER_PREFIX.sub(TOWER, name)), tensor.shape):
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


HF_FOLDERS = (HF_FOLDER, "hf_config", "")
"""Folders with the model's config and tokenizer, relative to the checkpoint and the folders above it."""


def open_source(path: str | Path, model: str | Path | None = None, role: str | None = None) -> CheckpointSource:
    """Open a checkpoint of any supported format.

    Args:
        path: a Hugging Face folder; adapters in peft's format; the checkpoint of a role; a ``global_step_<N>`` of
            megarl or verl; an ``iter_<N>`` of Megatron-LM or slime; or a folder of these with a pointer to the latest.
        model: Hugging Face folder with config and tokenizer, for a checkpoint without them; of adapters, the base
            model.
        role: one of :data:`ROLES`, if the folder has several; None = the first of them.

    Raises:
        CheckpointError: the folder has no supported format, is incomplete, or does not fit its config.
        ModelError: a Hugging Face folder is incomplete, or its architecture is unknown.
    """
    folder = find_checkpoint(Path(path), role)
    given = Path(model) if model is not None else None
    if (folder / ADAPTER_CONFIG).is_file():
        return open_adapter_folder(folder, given)
    if not (folder / INDEX).is_file():
        return open_hugging_face(folder)
    companions = _find_model(folder, given)
    config = read_model_config(companions)
    if (folder / STATE_FILE).is_file():
        return open_role(folder, config, companions, given)
    return _with_carried(open_torch_dist(folder, config, companions))


def find_checkpoint(path: Path, role: str | None = None) -> Path:
    """Return the folder with the tensors, at or below ``path``.

    Raises:
        CheckpointError: no checkpoint; the message lists the expected files.
    """
    if not path.is_dir():
        text = f"{path} does not exist" if not path.exists() else f"{path} is a file, expected a folder"
        raise CheckpointError(text, code="convert.no-folder")
    if (path / INDEX).is_file() or (path / ADAPTER_CONFIG).is_file():
        return path
    if (path / POINTER).is_file():
        return find_checkpoint(_pointed(path), role)
    for name in [role] if role is not None else ROLES:
        if (path / name).is_dir():
            return find_checkpoint(path / name)
    if (path / "dist_ckpt").is_dir():
        return find_checkpoint(path / "dist_ckpt")
    for folder in (path, path / "huggingface"):
        if any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
            return folder
    if (path / STATE_FILE).is_file() or any(path.glob("*.distcp")):
        text = f"{path / INDEX} is missing: the checkpoint is incomplete"
        raise CheckpointError(text, code="checkpoint.missing-index")
    if (path / CONFIG).is_file():
        return path
    pickled = [name for name in _PICKLED if (path / name).exists()]
    reason = f" ({pickled[0]} is a pickle, which could run code: save as safetensors or torch_dist)" if pickled else ""
    raise CheckpointError(
        f"{path} is neither a Hugging Face folder ({CONFIG}, *.safetensors) nor a Megatron checkpoint ({INDEX}, "
        f"*.distcp), nor a folder of checkpoints, such as a run's trainer.default_local_dir ({POINTER}){reason}",
        code="convert.unknown-source",
    )


def _pointed(path: Path) -> Path:
    text = (path / POINTER).read_text(encoding="utf-8", errors="replace").strip()
    names = ["release"] if text == "release" else []
    if re.fullmatch(r"\d{1,18}", text):
        names = [f"global_step_{int(text)}", f"iter_{int(text):07d}"]
    for name in names:
        if (path / name).is_dir():
            return path / name
    problem = (
        f"{path / POINTER} names {text[:40]!r}, but that checkpoint does not exist; name a checkpoint's own folder"
    )
    raise CheckpointError(problem, code="checkpoint.stale-pointer")


def _find_model(folder: Path, model: Path | None) -> Path:
    if model is not None:
        return model
    candidates = [base / name for base in (folder, folder.parent, folder.parent.parent) for name in HF_FOLDERS]
    for candidate in [*candidates, *model_folders(folder)]:
        if (candidate / CONFIG).is_file():
            return candidate
    raise CheckpointError(
        f"checkpoint {folder} does not name its Hugging Face model; pass a folder with its {CONFIG} and "
        f"tokenizer: --model FOLDER",
        code="convert.unknown-model",
    )


def open_hugging_face(path: Path) -> CheckpointSource:
    """Open a model folder; its head may be missing, see :attr:`CheckpointSource.lacks`.

    Raises:
        ModelError: the folder is incomplete: names the missing shard or tensor, truncated file, or wrong shape.
    """
    folder = check_model_folder(path, may_lack_head=True)
    shapes = WeightMap(folder.config, value_head=folder.config.is_value_model).hf_shapes()
    names = [name for name in shapes if name in folder.tensors]
    names += [name for name in SCORE if name in folder.tensors and name not in shapes]
    tensors = {name: _view(name, folder.tensors[name]) for name in names}
    carried = _carried(folder.config, folder.tensors, scalar_head=SCORE[0] in tensors)
    return CheckpointSource(
        path,
        HUGGING_FACE,
        folder.config,
        path,
        tensors,
        carried=carried,
        lacks=tuple(name for name in shapes if name not in folder.tensors),
        left_out=tuple(unused_tensors(folder)),
        facts={"files": len({entry.file for entry in folder.tensors.values()})},
    )


def _view(name: str, entry: TensorEntry) -> TensorView:
    if not entry.is_reversed:
        return whole_view(name, _stored(name, entry))
    assert entry.whole is not None and entry.expert is not None
    if entry.scales is None:
        stored = _stored(name, entry.whole)
        regions = whole_view(name, stored).regions
        return ExpertView(name, entry.shape, stored.dtype, regions, stored, entry.expert, entry.first_row)
    blocks, scales = (_stored_as(name, part, torch.uint8) for part in (entry.whole, entry.scales))
    regions = (*whole_view(name, blocks).regions, *whole_view(name, scales).regions)
    return QuantizedExpertView(name, entry.shape, torch.bfloat16, regions, blocks, scales, entry.expert)


def _stored(name: str, entry: TensorEntry) -> StoredTensor:
    if entry.dtype not in DTYPES:
        text = f"{entry.file}: tensor '{name}' has dtype {entry.dtype}, expected one of {', '.join(DTYPES)}"
        raise ModelError(text, code="model.tensor-dtype")
    return _stored_as(name, entry, DTYPES[entry.dtype])


def _stored_as(name: str, entry: TensorEntry, dtype: torch.dtype) -> StoredTensor:
    chunk = Chunk((0,) * len(entry.shape), entry.shape, entry.file, entry.offset)
    return StoredTensor(name, entry.shape, dtype, (chunk,))


def _with_carried(source: CheckpointSource, initial: Path | None = None) -> CheckpointSource:
    """Add the carried tensors of the first folder that has them."""
    base = None if source.adapters is None else source.adapters.base
    for folder in (source.companions, base, initial):
        entries = {} if folder is None else tensor_entries(folder)
        carried = _carried(source.config, entries, scalar_head=source.has_value_head)
        if carried:
            return replace(source, carried=carried, initial=initial)
    return replace(source, initial=initial)


def _carried(config: ModelConfig, entries: Mapping[str, TensorEntry], *, scalar_head: bool) -> dict[str, TensorView]:
    carried = {name: entry for name, entry in entries.items() if is_carried(config, name, scalar_head=scalar_head)}
    return {name: whole_view(name, _stored(name, entry)) for name, entry in carried.items()}


def open_adapter_folder(path: Path, model: Path | None = None) -> CheckpointSource:
    """Open adapters in peft's format as the model with the adapters merged.

    Args:
        model: folder of the base model; None = the one that ``adapter_config.json`` names.

    Raises:
        CheckpointError: the base model does not exist here, or the adapters do not fit it.
        ConfigError: the folder is damaged, or has unsupported settings.
    """
    folder = AdapterFolder(path)
    base_path = model or Path(str(folder.config.get("base_model_name_or_path")))
    if not base_path.is_dir():
        text = f"{path}: its base model {base_path} does not exist here; pass its folder: --model FOLDER"
        raise CheckpointError(text, code="convert.base-model-missing")
    folder.check_base(base_path)
    base = open_hugging_face(base_path)
    config = base.config.as_reward_model() if SCORE[0] in folder.tensors else base.config
    config = config.with_trained_tower(any(is_tower(config, name) for name in folder.tensors))
    views = {name: whole_view(name, _stored(name, entry)) for name, entry in folder.tensors.items()}
    bare = CheckpointSource(path, PEFT, config, base_path, {})
    return _with_carried(with_base(bare, base, views, options_of_folder(folder, config)))


def open_role(path: Path, config: ModelConfig, companions: Path, model: Path | None = None) -> CheckpointSource:
    """Open the checkpoint of a megarl role, saved in any layout.

    Args:
        companions: folder with the model's config and tokenizer.
        model: base model of a checkpoint of adapters; None = the folder that the run had.

    Raises:
        CheckpointError: a file is missing, malformed or truncated, or the tensors do not fit the model.
    """
    document, facts = _read_state(path / STATE_FILE)
    initial = document.get("initial") or (document.get("base") or {}).get("path")
    index = read_index(path)
    keys = [key for key in index.state_dict_metadata if key.startswith(WEIGHT)]
    stored = {t.name.removeprefix(WEIGHT): t for t in stored_tensors(path, index, keys).values()}
    shaped = config = config.with_trained_tower(any(is_tower(config, name) for name in stored))
    if SCORE[0] in stored and SCORE[1] not in stored:
        shaped = without_head_bias(config)
    if document.get("lora"):
        views = {name: whole_view(name, tensor) for name, tensor in stored.items()}
        bare = CheckpointSource(path, MEGARL, shaped, companions, {}, facts=facts)
        base = open_hugging_face(base_of_role(path, document, model))
        source = with_base(bare, base, views, options_of_role(document))
    else:
        expected = WeightMap(shaped, value_head=SCORE[0] in stored).hf_shapes()
        _check_shapes(path, stored, expected, companions)
        views = {name: whole_view(name, stored[name]) for name in expected}
        state = tuple(sorted({key.partition("/")[0] for key in index.state_dict_metadata} - {"weight"}))
        source = CheckpointSource(path, MEGARL, config, companions, views, state=state, facts=facts)
    source.check_files()
    return _with_carried(source, Path(initial) if isinstance(initial, str) else None)


def _check_shapes(
    path: Path, stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], companions: Path
) -> None:
    for name in [*expected, *stored]:
        if name not in stored or expected.get(name) != stored[name].shape:
            actual = f"has shape {list(stored[name].shape)}" if name in stored else "is absent"
            expected_shape = f"of shape {list(expected[name])}" if name in expected else "not part of the model"
            text = f"checkpoint {path}: tensor '{name}' {actual}; by {companions}/config.json it is {expected_shape}"
            raise CheckpointError(text, code="convert.config-mismatch")


def _read_state(file: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Read and check a role's ``state.json``; return it, and its facts for reports."""
    try:
        document = parse_json(file.read_text(encoding="utf-8"))
        if document["format"] != STATE_FORMAT:
            text = f"{file}: format={document['format']!r}, this megarl reads {STATE_FORMAT}"
            raise CheckpointError(text, code="checkpoint.other-format")
        layout = ParallelLayout(**document["layout"]).describe()
        if document.get("lora"):
            options_of_role(document)
            ModelIdentity(**document["base"])
        return document, {
            "saved by": f"megarl {document['megarl_version']} in {layout}",
            "dtype": document["dtype"],
            "optimizer steps": document["steps"],
        }
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is malformed: {error!r}", code="checkpoint.malformed-state") from error
