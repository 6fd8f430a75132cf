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
from megarl.models import WeightMap
from megarl.models.exported_config import exported_config, needs_head_bias


@dataclass(frozen=True)
class Selection:
    """The tensors to write, each in its number format, and the config that goes with them."""

    tensors: Mapping[str, TensorView]
    dtypes: Mapping[str, torch.dtype]
    config: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The number format that most elements have."""
        return _most_common(self.tensors, self.dtypes)

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
    if not tensors:
        raise CheckpointError(f"{source.path} holds no tensors")
    float32 = WeightMap(source.config).is_float32
    dtypes = {n: torch.float32 if float32(n) else dtype or view.dtype for n, view in tensors.items()}
    config = exported_config(source.config, tensors, _most_common(tensors, dtypes))
    if SCORE[0] in tensors and needs_head_bias(config) and SCORE[1] not in tensors:
        tensors[SCORE[1]] = TensorView(SCORE[1], (1,), tensors[SCORE[0]].dtype, ())
        dtypes[SCORE[1]] = dtypes[SCORE[0]]
    return Selection(tensors, dtypes, config)


def _most_common(tensors: Mapping[str, TensorView], dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    count: Counter[torch.dtype] = Counter()
    for name, view in tensors.items():
        count[dtypes[name]] += math.prod(view.shape)
    return count.most_common(1)[0][0]
