"""The one map between Megatron's parameters, the rollout engine's, and a Hugging Face checkpoint.

Every local tensor, in any layout, is described as rectangles of Hugging Face tensors (:class:`Piece`). Import,
export and weight sync all read this description; none has a reshape of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from megarl.models import partition
from megarl.models.declaration import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    TIED_LM_HEAD,
    VALUE_HEAD,
    VALUE_HEAD_BIAS,
    Declaration,
    Home,
    Split,
    dimension_sizes,
)
from megarl.models.hf_config import ModelConfig
from megarl.models.layout import ParallelLayout
from megarl.models.partition import FullTensor, LocalParam, Piece
from megarl.models.registry import family_of
from megarl.models.shard_pattern import ShardPattern

__all__ = ["Contribution", "LocalParam", "Piece", "WeightMap", "canonical_name"]

VOCAB_MULTIPLE = 16
"""Megatron's vocabulary shards have a multiple of this many rows, for the benefit of matrix multiplication."""

_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")


def canonical_name(name: str) -> str:
    """The name under which the weight map knows a Megatron parameter.

    Transformer Engine's layer spec fuses the two norms of a layer into the linear layers that follow them and names
    them after those, and keeps the weights of all of a rank's experts in one layer that numbers them; every other name
    is returned as it is.
    """
    for fused, local in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + local
    return _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)


class Site(NamedTuple):
    """One occurrence of a declaration; numbers that it does not use are 0."""

    declared: Declaration
    layer: int = 0
    expert: int = 0


class Contribution(NamedTuple):
    """What a rank could contribute, as the ``replica``-th of ``replicas`` that hold the same."""

    param: LocalParam
    replica: int
    replicas: int


class WeightMap:
    """Weight map of one model.

    Args:
        config: the model.
        value_head: the output layer is a scalar head, ``score.weight`` of shape ``[1, hidden]`` (a critic), with a
            bias ``score.bias`` if the model's is one of token classification.
    """

    def __init__(self, config: ModelConfig, value_head: bool = False) -> None:
        self.config = config
        self.value_head = value_head
        self._sizes = dimension_sizes(config)
        self._layer = family_of(config.architecture).layer
        self._output: tuple[Declaration, ...]
        if value_head:
            self._output = (VALUE_HEAD, VALUE_HEAD_BIAS) if config.has_head_bias else (VALUE_HEAD,)
        else:
            self._output = (TIED_LM_HEAD if config.tie_word_embeddings else LM_HEAD,)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every Hugging Face tensor, in checkpoint order; a tied output layer is not listed."""
        sites = self._declared(range(self.config.num_layers), self._all_experts, first=True, last=True)
        return {t.name: t.shape for site in sites if not site.declared.tied_copy for t in self._tensors(site)}

    def padded_vocab(self, tp: int) -> int:
        """Rows of Megatron's vocabulary: the smallest multiple of ``16 * tp`` that holds the model's."""
        multiple = VOCAB_MULTIPLE * tp
        return -(-self.config.vocab_size // multiple) * multiple

    def megatron_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """What one training rank holds.

        Names carry the global layer number (``decoder.layers.<n>...``) and the expert's number among all of its layer
        (``...local_experts.<n>...``), and are those of Megatron's local layer spec; :func:`canonical_name` maps
        Transformer Engine's onto them. With tied embeddings and several stages the last stage's
        ``output_layer.weight`` is a copy of the embedding.
        """
        return [self._megatron_shard(site, layout, rank) for site in self._held(layout, rank)]

    def contributions(self, layout: ParallelLayout, rank: int) -> list[Contribution]:
        """The part of :meth:`megatron_params` that a rank could contribute to an export or a checkpoint.

        Data- and context-parallel replicas (of experts: those that are left when tensor and expert parallelism have
        taken theirs) are told apart by ``replica``. Over the ranks with one value of it each element of each Hugging
        Face tensor occurs exactly once: unsplit parameters come from tensor-parallel rank 0, tied copies from nowhere.
        """
        where, among = layout.coordinate(rank), layout.expert_coordinate(rank)
        result = []
        for site in self._held(layout, rank):
            if site.declared.is_expert:
                replica, replicas = among.edp, layout.expert_dp
            else:
                replica, replicas = where.dp * layout.cp + where.cp, layout.dp * layout.cp
                if site.declared.tied_copy or (where.tp and site.declared.split is Split.REPLICATED):
                    continue
            result.append(Contribution(self._megatron_shard(site, layout, rank), replica, replicas))
        return result

    def export_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """The :meth:`contributions` of the first replicas: over all ranks each element exactly once."""
        return [contribution.param for contribution in self.contributions(layout, rank) if contribution.replica == 0]

    def rollout_params(self, tp: int, tp_rank: int, ep: int = 1) -> list[LocalParam]:
        """What one rank of the rollout engine holds, under SGLang's fused names.

        ``qkv_proj`` is this rank's rows of q, then k, then v; ``gate_up_proj`` likewise. The rank's experts of a layer
        are stacked: ``w13_weight`` is ``[experts, gate and up rows of this rank, hidden]``, ``w2_weight`` ``[experts,
        hidden, columns of this rank]``. The vocabulary is padded only as far as ``tp`` must divide it. A tied output
        layer is absent.

        Args:
            tp: tensor-parallel size of the engine.
            tp_rank: the rank.
            ep: expert-parallel size: as many groups of ``tp / ep`` neighbouring ranks divide a layer's experts, and
                the ranks of a group split each of theirs.

        Raises:
            ValueError: ``ep`` does not divide ``tp`` or the number of experts.
        """
        expert_tp, share = self._rollout_experts(tp, ep)
        mine = self._all_experts[tp_rank // expert_tp * share :][:share]
        params: dict[str, list[LocalParam]] = defaultdict(list)
        expert_names = set()
        for site in self._declared(range(self.config.num_layers), mine, first=True, last=True):
            if site.declared.rollout is not None:
                sharing = expert_tp if site.declared.is_expert else tp
                shard = self._rollout_shard(site, sharing, tp_rank % sharing)
                params[shard.name].append(shard)
                if site.declared.is_expert:
                    expert_names.add(shard.name)
        return [partition.stacked(n, parts) if n in expert_names else parts[0] for n, parts in params.items()]

    def patterns(self, layout: ParallelLayout, tp: int, ep: int = 1) -> list[ShardPattern]:
        """Every parameter that a trainer and a rollout engine both hold, once for all layers and experts.

        Args:
            layout: layout of the trainer.
            tp: tensor-parallel size of the engine.
            ep: expert-parallel size of the engine.

        Raises:
            ValueError: as :meth:`rollout_params`.
        """
        expert_tp, _ = self._rollout_experts(tp, ep)
        tied = layout.pp > 1 and TIED_LM_HEAD in self._output
        result = []
        for declared in (EMBEDDING, *self._layer, FINAL_NORM, *self._output):
            layers = tuple(self._layers_with(declared))
            if declared.rollout is None or not layers:
                continue
            site, of_experts = Site(declared, layers[0]), declared.is_expert
            sharing = expert_tp if of_experts else tp
            sources = 1 if declared.split is Split.REPLICATED else layout.expert_tp if of_experts else layout.tp
            result.append(
                ShardPattern(
                    declared.megatron,
                    TIED_LM_HEAD.megatron if tied and declared is EMBEDDING else None,
                    declared.rollout,
                    declared.home,
                    layers,
                    len(self._all_experts) if of_experts else 0,
                    declared.float32,
                    tuple(self._megatron_shard(site, layout, rank).pieces for rank in range(sources)),
                    tuple(self._rollout_shard(site, sharing, rank).pieces for rank in range(sharing)),
                )
            )
        return result

    def is_float32(self, hf_name: str) -> bool:
        """Whether a Hugging Face tensor is kept in float32 whatever the number format of the weights."""
        return hf_name in self._float32

    @cached_property
    def _float32(self) -> frozenset[str]:
        sites = self._declared(range(self.config.num_layers), range(0), first=False, last=False)
        return frozenset(t.name for site in sites if site.declared.float32 for t in self._tensors(site))

    def _layers_with(self, declared: Declaration) -> Iterator[int]:
        if declared.home is not Home.LAYER:
            yield 0
            return
        for layer in range(self.config.num_layers):
            if declared.when is None or declared.when(self.config, layer):
                yield layer

    def _rollout_shard(self, site: Site, sharing: int, rank: int) -> LocalParam:
        """One occurrence of a parameter on one of the engine's ranks that share it."""
        assert site.declared.rollout is not None
        name = site.declared.rollout.format(layer=site.layer)
        if site.declared.split is Split.GROUPED:
            return partition.heads_shard(name, self._tensors(site), self.config.num_key_value_heads, sharing, rank)
        return self._shard(name, site, sharing, rank, -(-self.config.vocab_size // sharing) * sharing)

    def _rollout_experts(self, tp: int, ep: int) -> tuple[int, int]:
        """Ranks that share an expert in the engine, and experts per rank."""
        experts = len(self._all_experts)
        if tp % ep or experts % ep:
            raise ValueError(
                f"rollout expert parallelism ep={ep} must divide tensor parallelism tp={tp} and the number of experts "
                f"{experts}"
            )
        return tp // ep, experts // ep

    @property
    def _all_experts(self) -> range:
        return range(self.config.experts.count if self.config.experts is not None else 0)

    def _declared(self, layers: Iterable[int], experts: Sequence[int], first: bool, last: bool) -> Iterator[Site]:
        if first:
            yield Site(EMBEDDING)
        for layer in layers:
            for declared in self._layer:
                if declared.when is None or declared.when(self.config, layer):
                    numbers = experts if declared.is_expert else (0,)
                    yield from (Site(declared, layer, number) for number in numbers)
        if last:
            yield Site(FINAL_NORM)
            yield from (Site(declared) for declared in self._output)

    def _held(self, layout: ParallelLayout, rank: int) -> Iterator[Site]:
        """What is declared for a training rank's pipeline stage and its share of the experts."""
        stage, among = layout.coordinate(rank).pp, layout.expert_coordinate(rank)
        first, last = stage == 0, stage == layout.pp - 1
        share = len(self._all_experts) // layout.ep
        experts = self._all_experts[among.ep * share : (among.ep + 1) * share]
        for site in self._declared(layout.stage_layers(self.config.num_layers, stage), experts, first, last):
            if not (site.declared.tied_copy and first):
                yield site

    def _megatron_shard(self, site: Site, layout: ParallelLayout, rank: int) -> LocalParam:
        name = site.declared.megatron.format(layer=site.layer, expert=site.expert)
        if site.declared.is_expert:
            return self._shard(name, site, layout.expert_tp, layout.expert_coordinate(rank).etp, 0)
        tp, tp_rank = layout.tp, layout.coordinate(rank).tp
        if site.declared.split is Split.GROUPED:
            groups = self.config.num_key_value_heads
            return partition.grouped_shard(name, self._tensors(site), groups, tp, tp_rank)
        return self._shard(name, site, tp, tp_rank, self.padded_vocab(tp))

    def _shard(self, name: str, site: Site, tp: int, tp_rank: int, padded: int) -> LocalParam:
        tensors = self._tensors(site)
        match site.declared.split:
            case Split.REPLICATED:
                return partition.replicated(name, tensors)
            case Split.COLUMN:
                return partition.column_shard(name, tensors, tp, tp_rank)
            case Split.ROW:
                return partition.row_shard(name, tensors[0], tp, tp_rank)
            case Split.VOCAB:
                return partition.vocab_shard(name, tensors[0], padded, tp, tp_rank)
            case Split.GROUPED:
                raise AssertionError("the trainer and the engine order these rows differently")

    def _tensors(self, site: Site) -> list[FullTensor]:
        return [
            FullTensor(t.name.format(layer=site.layer, expert=site.expert), tuple(self._sizes[d] for d in t.dims))
            for t in site.declared.hf
        ]
