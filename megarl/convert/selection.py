"""What of a source is written: with or without its scalar head, in which number format, and under which config."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.convert.source import SCORE, Source
from megarl.convert.stored import TensorView
from megarl.errors import CheckpointError
from megarl.models import WeightMap, known_architectures
from megarl.models.hf_config import VALUE_MODELS

LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Selection:
    """The tensors to write, each in its number format, and the config that goes with them."""

    tensors: Mapping[str, TensorView]
    dtypes: Mapping[str, torch.dtype]
    config: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The number format that most elements have."""
        count: Counter[torch.dtype] = Counter()
        for name, view in self.tensors.items():
            count[self.dtypes[name]] += math.prod(view.shape)
        return count.most_common(1)[0][0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they will be written."""
        return sum(math.prod(view.shape) * self.dtypes[name].itemsize for name, view in self.tensors.items())


def select(source: Source, dtype: torch.dtype | None = None, keep_value_head: bool = True) -> Selection:
    """Chooses what to write.

    Args:
        source: where from.
        dtype: number format of the weights; None keeps each tensor's own. What a model keeps in float32 stays so.
        keep_value_head: write the scalar head, as a model of token classification where the family has one, which is
            what critics are made of elsewhere; otherwise leave it out.

    Raises:
        CheckpointError: nothing would be left.
    """
    tensors = dict(source.tensors)
    if not keep_value_head:
        tensors = {name: view for name, view in tensors.items() if name not in SCORE}
    config = _config(source, tensors)
    if keep_value_head and source.has_value_head and _wants_bias(config) and SCORE[1] not in tensors:
        tensors[SCORE[1]] = TensorView(SCORE[1], (1,), tensors[SCORE[0]].dtype, ())
    if not tensors:
        raise CheckpointError(f"{source.path} holds no tensors")
    float32 = WeightMap(source.config).is_float32
    dtypes = {n: torch.float32 if float32(n) else dtype or view.dtype for n, view in tensors.items()}
    selection = Selection(tensors, dtypes, config)
    # transformers 4 reads torch_dtype, transformers 5 either.
    config["dtype" if "dtype" in config else "torch_dtype"] = str(selection.dtype).removeprefix("torch.")
    return selection


def _config(source: Source, tensors: Mapping[str, TensorView]) -> dict[str, Any]:
    raw, architecture = dict(source.config.raw), source.config.architecture
    if "num_nextn_predict_layers" in raw:
        raw["num_nextn_predict_layers"] = 0  # such layers are not part of the model
    base = architecture.removesuffix("ForCausalLM")
    for kind in VALUE_MODELS:
        base = base.removesuffix(kind)
    if SCORE[0] not in tensors:
        complete = source.config.tie_word_embeddings or LM_HEAD in tensors
        raw["architectures"] = [f"{base}ForCausalLM" if complete else f"{base}Model"]
    elif LM_HEAD not in tensors and not source.config.is_value_model:
        kinds = [f"{base}{kind}" for kind in reversed(VALUE_MODELS) if f"{base}{kind}" in known_architectures()]
        raw["architectures"] = kinds[:1]
    if SCORE[0] in tensors and LM_HEAD not in tensors:
        raw["id2label"], raw["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    return raw


def _wants_bias(config: Mapping[str, Any]) -> bool:
    architecture: str = config["architectures"][0]
    return architecture.endswith(VALUE_MODELS[1]) and bool(config.get("token_classification_bias", True))
