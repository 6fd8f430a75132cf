"""What the shards of a parameter have in common over layers and experts, so that planning need not repeat itself."""

from __future__ import annotations

from typing import NamedTuple

from megarl.models.declaration import Home
from megarl.models.partition import Piece


class ShardPattern(NamedTuple):
    """All occurrences of one parameter that a trainer and a rollout engine both hold.

    Names hold ``{layer}`` and ``{expert}``. The pieces are those of one occurrence: every other has the same rectangles
    of tensors of its own, and the engine puts its experts one behind the other along a first dimension that the pieces
    lack.

    Attributes:
        megatron: name in the trainer.
        copy: name of the copy that the last pipeline stage holds besides, where there is one.
        rollout: name in the engine.
        home: which pipeline stages hold it.
        layers: the layers that have it; ``(0,)`` of a parameter outside the layers.
        experts: how many each layer has; 0 = it is not of an expert.
        float32: it is float32 whatever the number format of the weights.
        sources: pieces on each (expert-)tensor-parallel rank of the trainer; one entry where all hold the same.
        targets: pieces on each rank of the engine that shares an occurrence: tensor-parallel, of an expert those of one
            expert-parallel group.
    """

    megatron: str
    copy: str | None
    rollout: str
    home: Home
    layers: tuple[int, ...]
    experts: int
    float32: bool
    sources: tuple[tuple[Piece, ...], ...]
    targets: tuple[tuple[Piece, ...], ...]
