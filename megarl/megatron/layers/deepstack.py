"""A decoder layer after which features of images are added (DeepStack, https://arxiv.org/abs/2406.04334)."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class DeepstackLayer(TransformerLayer):
    """A transformer layer of a model whose vision tower has features for several layers."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the layer, and add the features for it to the tokens of images."""
        hidden, context = super().forward(*args, **kwargs)
        image_rows = kwargs["packed_seq_params"].image_rows
        if image_rows is None or self.layer_number >= image_rows[1].shape[1]:
            return hidden, context
        at, features = image_rows
        return hidden.index_add(0, at, features[:, self.layer_number, None].to(hidden.dtype)), context
