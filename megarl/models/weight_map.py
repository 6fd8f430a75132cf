"""The one map between Megatron's parameters, the rollout engine's, and a Hugging Face checkpoint.

Every local tensor, in any layout, is described as rectangles of Hugging Face tensors (:class:`Piece`). Import,
export and weight sync all read this description; none has a reshape of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models import partition
from megarl.models.declaration import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    TIED_LM_HEAD,
    VALUE_HEAD,
    Declaration,
    Split,
    dimension_sizes,
)
from megarl.models.hf_config import ModelConfig
from megarl.models.layout import ParallelLayout
from megarl.models.partition import FullTensor, LocalParam, Piece
from megarl.models.registry import family_of

__all__ = ["LocalParam", "Piece", "WeightMap", "canonical_name"]

VOCAB_MULTIPLE = 16
"""Megatron's vocabulary shards have a multiple of this many rows, for the benefit of matrix multiplication."""

_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}


def canonical_name(name: str) -> str:
    """The name under which the weight map knows a Megatron parameter.

    Transformer Engine's layer spec fuses the two norms of a layer into the linear layers that follow them and names
    them after those; every other name is returned as it is.
    """
    for fused, local in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + local
    return name


class WeightMap:
    """Weight map of one model.

    Args:
        config: the model.
        value_head: the output layer is a scalar head, ``score.weight`` of shape ``[1, hidden]`` (a critic).
    """

    def __init__(self, config: ModelConfig, value_head: bool = False) -> None:
        self.config = config
        self.value_head = value_head
        self._sizes = dimension_sizes(config)
        self._layer = family_of(config.architecture).layer
        if value_head:
            self._output = VALUE_HEAD
        else:
            self._output = TIED_LM_HEAD if config.tie_word_embeddings else LM_HEAD

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every Hugging Face tensor, in checkpoint order; a tied output layer is not listed."""
        declared = self._declared(range(self.config.num_layers), first=True, last=True)
        return {t.name: t.shape for d, layer in declared if not d.tied_copy for t in self._tensors(d, layer)}

    def padded_vocab(self, tp: int) -> int:
        """Rows of Megatron's vocabulary: the smallest multiple of ``16 * tp`` that holds the model's."""
        multiple = VOCAB_MULTIPLE * tp
        return -(-self.config.vocab_size // multiple) * multiple

    def megatron_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """What one training rank holds.

        Names carry the global layer number (``decoder.layers.<n>...``) and are those of Megatron's local layer spec;
        :func:`canonical_name` maps Transformer Engine's onto them. With tied embeddings and several stages the last
        stage's ``output_layer.weight`` is a copy of the embedding.
        """
        tp_rank = layout.coordinate(rank).tp
        return [self._megatron_shard(d, layer, layout.tp, tp_rank) for d, layer in self._held(layout, rank)]

    def export_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """The part of :meth:`megatron_params` that a rank contributes to an export.

        Over all ranks each element of each Hugging Face tensor occurs exactly once: data-parallel rank 0 exports,
        replicated parameters come from tensor-parallel rank 0, tied copies from nowhere.
        """
        where = layout.coordinate(rank)
        if where.dp:
            return []
        return [
            self._megatron_shard(d, layer, layout.tp, where.tp)
            for d, layer in self._held(layout, rank)
            if not d.tied_copy and (where.tp == 0 or d.split is not Split.REPLICATED)
        ]

    def rollout_params(self, tp: int, tp_rank: int) -> list[LocalParam]:
        """What one rank of the rollout engine holds, under SGLang's fused names.

        ``qkv_proj`` is this rank's rows of q, then k, then v; ``gate_up_proj`` likewise. The vocabulary is padded
        only as far as ``tp`` must divide it. A tied output layer is absent.
        """
        padded = -(-self.config.vocab_size // tp) * tp
        params = []
        for declared, layer in self._declared(range(self.config.num_layers), first=True, last=True):
            if declared.rollout is not None:
                name = declared.rollout.format(layer=layer)
                params.append(self._shard(name, declared, layer, tp, tp_rank, padded))
        return params

    def _declared(self, layers: range, first: bool, last: bool) -> Iterator[tuple[Declaration, int]]:
        if first:
            yield EMBEDDING, -1
        for layer in layers:
            for declared in self._layer:
                yield declared, layer
        if last:
            yield FINAL_NORM, -1
            yield self._output, -1

    def _held(self, layout: ParallelLayout, rank: int) -> Iterator[tuple[Declaration, int]]:
        """Declarations of a training rank's pipeline stage."""
        stage = layout.coordinate(rank).pp
        first, last = stage == 0, stage == layout.pp - 1
        for declared, layer in self._declared(layout.layers(self.config.num_layers, stage), first, last):
            if not (declared.tied_copy and first):
                yield declared, layer

    def _megatron_shard(self, declared: Declaration, layer: int, tp: int, tp_rank: int) -> LocalParam:
        name = declared.megatron.format(layer=layer)
        if declared.split is Split.GROUPED:
            groups = self.config.num_key_value_heads
            return partition.grouped_shard(name, self._tensors(declared, layer), groups, tp, tp_rank)
        return self._shard(name, declared, layer, tp, tp_rank, self.padded_vocab(tp))

    def _shard(self, name: str, declared: Declaration, layer: int, tp: int, tp_rank: int, padded: int) -> LocalParam:
        tensors = self._tensors(declared, layer)
        match declared.split:
            case Split.REPLICATED:
                return partition.replicated(name, tensors)
            case Split.COLUMN | Split.GROUPED:
                return partition.column_shard(name, tensors, tp, tp_rank)
            case Split.ROW:
                return partition.row_shard(name, tensors[0], tp, tp_rank)
            case Split.VOCAB:
                return partition.vocab_shard(name, tensors[0], padded, tp, tp_rank)

    def _tensors(self, declared: Declaration, layer: int) -> list[FullTensor]:
        return [FullTensor(t.name.format(layer=layer), tuple(self._sizes[d] for d in t.dims)) for t in declared.hf]
