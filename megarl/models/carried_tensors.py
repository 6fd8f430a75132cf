"""Tensors that are not trained, which exports carry over from the initial folder bit for bit, in their own dtype.

They are the frozen vision tower, and multi-token prediction (MTP) layers, which speculative decoding uses. DeepSeek-V3
and GLM-4.5 have these after the last decoder layer (``model.layers.<num_hidden_layers>``, ``num_nextn_predict_layers``
of them), Qwen3-Next and Qwen3.5 under ``mtp``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.base.errors import ModelError
from megarl.models.hf_folder import (
    HEAD,
    SCORE,
    SCORE_BIAS,
    ModelFolder,
    TensorEntry,
    check_tower,
    is_tower,
    tensor_entries,
)
from megarl.models.model_config import TEXT_SECTION, ModelConfig
from megarl.models.weight_map import WeightMap

_AFTER_LAST, _SEPARATE = ("num_nextn_predict_layers", "num_mtp_layers"), "mtp_num_hidden_layers"
"""Fields of ``config.json`` with the number of layers: after the last decoder layer (two names), or under ``mtp``."""

logger = logging.getLogger(__name__)


def is_multi_token(config: ModelConfig, name: str) -> bool:
    """Return whether a Hugging Face tensor belongs to a multi-token prediction layer."""
    if name.startswith("mtp."):
        return True
    first, count = config.num_layers, max(_count(config.settings, field) for field in _AFTER_LAST)
    return any(name.startswith(f"model.layers.{layer}.") for layer in range(first, first + count))


def is_carried(config: ModelConfig, name: str, *, scalar_head: bool = False) -> bool:
    """Return whether exports take a Hugging Face tensor from the initial folder.

    Models with a scalar head predict no tokens and have no multi-token prediction layers, but they see images.
    """
    if is_tower(config, name):
        return not config.trains_tower
    return not scalar_head and is_multi_token(config, name)


def unused_tensors(folder: ModelFolder) -> list[str]:
    """Return the tensors that nothing reads: neither the model's, nor a head, nor carried ones."""
    config = folder.config
    known = {*WeightMap(config, value_head=config.is_value_model).hf_shapes(), SCORE, SCORE_BIAS}
    if config.tie_word_embeddings:
        known.add(HEAD)
    return sorted(name for name in folder.tensors.keys() - known if not is_carried(config, name))


def warn_of_unused(folder: str | Path, names: Sequence[str]) -> None:
    """Warn of the tensors in a folder that nothing loads; no names, no warning."""
    if names:
        logger.warning(
            "%s has %d tensors that are not part of the model by its config.json and are not loaded: %s",
            folder,
            len(names),
            ", ".join(names[:5]) + (" ..." if len(names) > 5 else ""),
        )


def carried_tensors(folder: Path | None, config: ModelConfig, exported: Collection[str]) -> dict[str, TensorEntry]:
    """Return the tensors that an export takes from the initial folder (:func:`is_carried`).

    If the folder is gone or lacks multi-token prediction layers that the config announces, a warning names it, and the
    exported config announces none (:func:`with_multi_token_layers`).

    Args:
        folder: the initial model folder; it may be damaged, lack weights, or not exist. None = unknown.
        exported: names of the other exported tensors.

    Raises:
        ModelError: the folder lacks the vision tower, or a tensor of it.
    """
    carried, name = dict[str, TensorEntry](), str(folder or "the initial model folder")
    scalar_head = SCORE in exported
    try:
        entries = {} if folder is None else tensor_entries(folder)
        carried = {n: entry for n, entry in entries.items() if is_carried(config, n, scalar_head=scalar_head)}
    except ModelError as error:
        name = f"{error.text}; {name}"
    check_tower(name, config, carried)
    if not scalar_head and not any(is_multi_token(config, tensor) for tensor in carried):
        warn_of_missing_layers(config, name)
    return carried


def warn_of_missing_layers(config: ModelConfig, folder: str) -> None:
    """Warn that an export has none of the layers that ``config.json`` announces; ``folder`` lacks their weights."""
    announced = announced_layers(config)
    if announced:
        logger.warning(
            "%s has no weights of the multi-token prediction layers that config.json announces (%s): the export has "
            "none, and its config announces 0. Speculative decoding with them needs a copy from the original model",
            folder,
            announced,
        )


def with_multi_token_layers(raw: Mapping[str, Any], config: ModelConfig, exported: Iterable[str]) -> dict[str, Any]:
    """Return an exported ``config.json``, which announces only layers whose tensors are there."""
    if any(is_multi_token(config, name) for name in exported):
        return dict(raw)
    result = {key: 0 if key in (*_AFTER_LAST, _SEPARATE) else value for key, value in raw.items()}
    if isinstance(raw.get(TEXT_SECTION), Mapping):
        result[TEXT_SECTION] = with_multi_token_layers(raw[TEXT_SECTION], config, ())
    return result


def announced_layers(config: ModelConfig) -> str:
    """Return the field of ``config.json`` that announces multi-token prediction layers, with its value; or ''."""
    fields = [f"{field}={count}" for field in (*_AFTER_LAST, _SEPARATE) if (count := _count(config.settings, field))]
    return ", ".join(fields)


def _count(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    return value if isinstance(value, int) else 0
