"""The ``config.json`` that goes with exported weights: who writes weights, by whatever way, names the model alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from megarl.models.hf_config import VALUE_MODELS, ModelConfig
from megarl.models.hf_folder import HEAD, SCORE
from megarl.models.registry import known_architectures

CAUSAL, BARE = "ForCausalLM", "Model"


def exported_config(config: ModelConfig, tensors: Collection[str], dtype: torch.dtype | None) -> dict[str, Any]:
    """The config of a model as it is written.

    A scalar head that was put on a language model makes it a model of token classification with one label, which is
    what critics are made of elsewhere, or one of sequence classification where the family has no other. A model that
    had a scalar head before keeps its kind. Without any head what remains is the bare model.

    Args:
        config: of the model that was loaded.
        tensors: names of what is written.
        dtype: the number format that most elements have; None where nothing is written.
    """
    raw = dict(config.raw)
    if "num_nextn_predict_layers" in raw:
        raw["num_nextn_predict_layers"] = 0  # such layers are not part of the model
    if SCORE not in tensors:
        complete = config.tie_word_embeddings or HEAD in tensors
        raw["architectures"] = [config.base_architecture + (CAUSAL if complete else BARE)]
    elif HEAD not in tensors:
        if not config.is_value_model:
            raw["architectures"] = [_with_scalar_head(config)]
        raw["id2label"], raw["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    # transformers 4 reads torch_dtype, transformers 5 either.
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).removeprefix("torch.")
    return raw


def needs_head_bias(exported: dict[str, Any]) -> bool:
    """Whether the model that an exported config names has a bias on its scalar head."""
    architecture: str = exported["architectures"][0]
    return architecture.endswith(VALUE_MODELS[1]) and bool(exported.get("token_classification_bias", True))


def _with_scalar_head(config: ModelConfig) -> str:
    names = [config.base_architecture + kind for kind in reversed(VALUE_MODELS)]
    return next((name for name in names if name in known_architectures()), names[-1])
