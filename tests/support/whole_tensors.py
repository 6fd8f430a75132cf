"""Assembles full tensors from the shards of all ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megarl.models import ParallelLayout, WeightMap, read_model_config


def whole_tensors(
    path: Path, layout: ParallelLayout, local: list[dict[str, Tensor]], *, value_head: bool = False, tower: bool = False
) -> dict[str, Tensor]:
    """Assemble Hugging Face tensors from the Megatron shards of all ranks.

    Replicated shards must be equal, and vocabulary padding must be zero.
    """
    weight_map = WeightMap(read_model_config(path).with_trained_tower(tower), value_head)
    whole = {name: torch.full(shape, torch.nan) for name, shape in weight_map.hf_shapes().items()}
    for rank, tensors in enumerate(local):
        params = weight_map.megatron_params(layout, rank)
        assert {param.name for param in params} == set(tensors)
        for param in params:
            covered = torch.zeros(param.shape, dtype=torch.bool)
            for piece in param.pieces:
                source = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.shape, strict=True))
                target = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
                part, present = tensors[param.name][source].float(), whole[piece.hf_name][target]
                if not present.isnan().any():
                    torch.testing.assert_close(part, present, rtol=1e-5, atol=1e-7)
                whole[piece.hf_name][target] = part
                covered[source] = True
            assert not tensors[param.name][~covered].any(), f"padding of {param.name} is not zero"
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole
