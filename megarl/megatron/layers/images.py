"""Features of images in the decoder: those of a trained tower with their gradients, and layers that add some."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megarl.models.vision_tower import ImageRows, TowerInput, tower_features

VISION = "is_vision_tower"
"""Mark on the parameters of a trained vision tower."""
AVERAGED = "average_gradients_across_tp_domain"
"""Megatron's mark on parameters whose gradients it averages over the tensor-parallel ranks."""
TOWER_MARKS = (VISION, AVERAGED)
"""Marks that adapters of a vision tower take from their weight."""


class DeepstackLayer(TransformerLayer):
    """A transformer layer after which features of images are added (DeepStack, https://arxiv.org/abs/2406.04334)."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the layer, and add the features for it to the tokens of images."""
        hidden, context = super().forward(*args, **kwargs)
        image_rows = kwargs["packed_seq_params"].image_rows
        if image_rows is None or self.layer_number >= len(image_rows[1]):
            return hidden, context
        at, features = image_rows
        return hidden.index_add(0, at, features[self.layer_number][:, None].to(hidden.dtype)), context


def trained_features(tower: nn.Module, inputs: TowerInput) -> ImageRows:
    """Compute the features of a micro-batch's images with the graph for the tower's gradients."""
    images = [tower_features(tower, *image) for image in zip(inputs.patches, inputs.grids, strict=True)]
    levels = torch.cat(images).transpose(0, 1).index_select(1, inputs.rows)
    if len(levels) == 1:
        return inputs.at, levels
    added = levels[1:].detach().requires_grad_()
    return inputs.at, (_JoinedLevels.apply(levels, [added]), *added)


class _JoinedLevels(torch.autograd.Function):
    """Features that replace embeddings; the backward joins their gradient with that of the added features.

    A recomputed layer runs a backward pass of its own. If that entered the tower, the tower's graph would be gone for
    the next layer. So added features are a leaf, whose gradient is complete when the backward reaches the embeddings.
    """

    @staticmethod
    def forward(ctx: Any, levels: Tensor, added: list[Tensor]) -> Tensor:
        (ctx.added,) = added  # in a list, so that the leaf is no input: its gradient is complete before this node runs
        return levels[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        added: Tensor = ctx.added
        of_added = torch.zeros_like(added) if added.grad is None else added.grad
        return torch.cat([gradients[0][None], of_added]), None
