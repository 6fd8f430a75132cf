"""Multi-token prediction (MTP) layers, which are not trained: exports carry their tensors over from the initial folder.

Speculative decoding uses these layers. DeepSeek-V3 and GLM-4.5 have them after the last decoder layer
(``model.layers.<num_hidden_layers>``, ``num_nextn_predict_layers`` of them), Qwen3-Next and Qwen3.5 under ``mtp``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.base.errors import ModelError
from megarl.models.hf_folder import HEAD, SCORE, SCORE_BIAS, ModelFolder, TensorEntry, tensor_entries
from megarl.models.model_config import ModelConfig
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


def unused_tensors(folder: ModelFolder) -> list[str]:
    """Return the tensors that no load reads: neither the model's, nor a head, nor multi-token prediction layers'."""
    config = folder.config
    known = {*WeightMap(config, value_head=config.is_value_model).hf_shapes(), SCORE, SCORE_BIAS}
    if config.tie_word_embeddings:
        known.add(HEAD)
    return sorted(name for name in folder.tensors.keys() - known if not is_multi_token(config, name))


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
    """Return the multi-token prediction tensors that an export takes from the initial folder.

    Models with a scalar head have none: they predict no tokens. If the folder is gone or lacks layers that the config
    announces, a warning names it, and the exported config announces none (:func:`with_multi_token_layers`).

    Args:
        folder: the initial model folder; it may be damaged, lack weights, or not exist. None = unknown.
        exported: names of the other exported tensors.
    """
    if SCORE in exported:
        return {}
    carried, name = dict[str, TensorEntry](), str(folder or "the initial model folder")
    try:
        entries = {} if folder is None else tensor_entries(folder)
        carried = {tensor: entry for tensor, entry in entries.items() if is_multi_token(config, tensor)}
    except ModelError as error:
        name = f"{error.text}; {name}"
    if not carried:
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
    return {key: 0 if key in (*_AFTER_LAST, _SEPARATE) else value for key, value in raw.items()}


def announced_layers(config: ModelConfig) -> str:
    """Return the field of ``config.json`` that announces multi-token prediction layers, with its value; or ''."""
    fields = [f"{field}={count}" for field in (*_AFTER_LAST, _SEPARATE) if (count := _count(config.settings, field))]
    return ", ".join(fields)


def _count(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    return value if isinstance(value, int) else 0
