"""The weight map between the parameters of Megatron and the rollout engine, and a Hugging Face checkpoint.

Every local tensor, in any layout, is a set of rectangles of Hugging Face tensors (:class:`Piece`). Import, export and
weight sync all use this description.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from megarl.models import partition
from megarl.models.declaration import (
    EMBEDDING,
    FINAL_NORM,
    LAYER_PREFIX,
    LM_HEAD,
    TIED_LM_HEAD,
    VALUE_HEAD,
    VALUE_HEAD_BIAS,
    Declaration,
    EngineSplit,
    PipelineStage,
    Split,
)
from megarl.models.layout import ParallelLayout
from megarl.models.model_config import LinearAttention, ModelConfig
from megarl.models.partition import FullTensor, LocalParam, Piece
from megarl.models.registry import count, family_of
from megarl.models.tower_class import tower_declarations

__all__ = ["Contribution", "LocalParam", "Piece", "ShardPattern", "WeightMap", "canonical_name"]

VOCAB_MULTIPLE = 16
"""Rows of Megatron's vocabulary shards are a multiple of this number, for efficient matrix multiplication."""

_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def canonical_name(name: str) -> str:
    """Translate a Megatron parameter name to the name in the weight map.

    Transformer Engine's layer spec fuses a layer's two norms into the following linear layers and names them after
    these, and keeps the weights of a rank's experts in one layer that numbers them. Other names stay unchanged.
    """
    for fused, local in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + local
    return _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\3.\1.\2", name)


class ParameterInstance(NamedTuple):
    """One instance of a declaration in a model; unused numbers are 0."""

    declared: Declaration
    layer: int = 0
    expert: int = 0


class Contribution(NamedTuple):
    """A parameter that a rank can contribute to an export, as replica number ``replica``.

    ``is_writer`` selects one of its replicas: they take turns, so that each writes a share of a checkpoint.
    """

    param: LocalParam
    replica: int
    is_writer: bool


class ShardPattern(NamedTuple):
    """All instances, over layers and experts, of one parameter of trainer and rollout engine: one plan for all.

    Names contain ``{layer}`` and ``{expert}``. The pieces describe one instance; the others have the same rectangles of
    their own tensors. The engine stacks experts along a first dimension that the pieces lack.

    Attributes:
        copy: name of the additional copy on the last pipeline stage; None without a copy.
        layers: the layers that have it; ``(0,)`` for a parameter outside the layers.
        experts: experts per layer; 0 for a parameter outside the experts.
        sources: pieces on each (expert-)tensor-parallel rank of the trainer; one entry for a replicated parameter.
        targets: pieces on each engine rank that shares an instance: tensor-parallel ranks, or for an expert the ranks
            of one expert-parallel group.
    """

    megatron: str
    copy: str | None
    rollout: str
    stage: PipelineStage
    layers: tuple[int, ...]
    experts: int
    float32: bool
    linear: bool
    sources: tuple[tuple[Piece, ...], ...]
    targets: tuple[tuple[Piece, ...], ...]


class WeightMap:
    """Weight map of one model.

    Args:
        value_head: the output layer is a scalar head (a critic): ``score.weight`` of shape ``[1, hidden]``, with a bias
            ``score.bias`` if the architecture is a token classification model.
    """

    def __init__(self, config: ModelConfig, value_head: bool = False) -> None:
        self.config = config
        self.value_head = value_head
        self._sizes = dimension_sizes(config)
        self._layer = family_of(config.architecture).layer
        self._tower = () if config.vision is None else tower_declarations(config.vision)
        self._output: tuple[Declaration, ...] = (TIED_LM_HEAD if config.tie_word_embeddings else LM_HEAD,)
        if value_head:
            self._output = (VALUE_HEAD, VALUE_HEAD_BIAS) if config.has_head_bias else (VALUE_HEAD,)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every Hugging Face tensor, in checkpoint order, without a tied output layer."""
        instances = self._declared(range(self.config.num_layers), self._all_experts, first=True, last=True)
        listed = (instance for instance in instances if not instance.declared.tied_copy)
        return {tensor.name: tensor.shape for instance in listed for tensor in self._tensors(instance)}

    def padded_vocab(self, tp: int) -> int:
        """Return the rows of Megatron's vocabulary: the model's, rounded up to a multiple of ``16 * tp``."""
        multiple = VOCAB_MULTIPLE * tp
        return -(-self.config.vocab_size // multiple) * multiple

    def megatron_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """Return the parameters of one training rank.

        Names are those of Megatron's local layer spec (see :func:`canonical_name`), with the global layer number
        (``decoder.layers.<n>...``) and the expert's number within its layer (``...local_experts.<n>...``). With tied
        embeddings and several stages the last stage's ``output_layer.weight`` is a copy of the embedding.
        """
        return [self._megatron_shard(instance, layout, rank) for instance in self._held(layout, rank)]

    def output_shard(self, tokens: int, padded: int, tp: int, tp_rank: int) -> LocalParam:
        """Return rows of the output layer, sharded like another model's vocabulary (a student's).

        Args:
            tokens: the other vocabulary, at most this one; later rows are left out.
            padded: rows of the other padded vocabulary.
            tp: the other model's tensor-parallel size.
        """
        (tensor,) = self._tensors(ParameterInstance(self._output[0]))
        rows = tensor._replace(shape=(tokens, *tensor.shape[1:]))
        return partition.vocab_shard("output_layer.weight", rows, padded, tp, tp_rank)

    def contributions(self, layout: ParallelLayout, rank: int) -> list[Contribution]:
        """Return the :meth:`megatron_params` that a rank contributes to an export or a checkpoint.

        ``replica`` numbers data- and context-parallel replicas (of experts: the ranks outside expert and expert-tensor
        parallelism). Over a replica's ranks each element of each Hugging Face tensor occurs exactly once: unsplit
        parameters come from tensor-parallel rank 0, tied copies from none.
        """
        coordinate, expert_coordinate = layout.coordinate(rank), layout.expert_coordinate(rank)
        result = []
        # Replicas hold the same instances. They contribute different lists: only some have tensor-parallel rank 0.
        for number, instance in enumerate(self._held(layout, rank)):
            if instance.declared.is_expert:
                replica, replicas = expert_coordinate.edp, layout.expert_dp
            else:
                replica, replicas = coordinate.dp * layout.cp + coordinate.cp, layout.dp * layout.cp
                if instance.declared.tied_copy or (coordinate.tp and instance.declared.split is Split.REPLICATED):
                    continue
            shard = self._megatron_shard(instance, layout, rank)
            result.append(Contribution(shard, replica, number % replicas == replica))
        return result

    def export_params(self, layout: ParallelLayout, rank: int) -> list[LocalParam]:
        """Return the :meth:`contributions` of the first replicas: over all ranks each element exactly once."""
        return [contribution.param for contribution in self.contributions(layout, rank) if contribution.replica == 0]

    def rollout_params(self, tp: int, tp_rank: int, ep: int = 1, vocab_multiple: int = 1) -> list[LocalParam]:
        """Return the parameters of one rank of the rollout engine, under SGLang's fused names.

        ``qkv_proj`` contains this rank's rows of q, then k, then v; ``gate_up_proj`` its rows of gate, then up. The
        rank's experts of a layer are stacked: ``w13_weight`` is ``[experts, gate and up rows of this rank, hidden]``,
        ``w2_weight`` is ``[experts, hidden, columns of this rank]``. A vocabulary shard has no padding, so the last
        ranks may have fewer rows. A tied output layer is absent.

        Args:
            ep: ``ep`` groups of ``tp / ep`` neighbouring ranks divide a layer's experts; a group splits each expert.
            vocab_multiple: the engine rounds the vocabulary up to a multiple of this number (and of ``tp``).

        Raises:
            ValueError: ``ep`` does not divide ``tp`` or the number of experts, or ``tp`` does not divide the rounded
                vocabulary.
        """
        expert_tp, share = self._rollout_experts(tp, ep)
        mine = self._all_experts[tp_rank // expert_tp * share :][:share]
        params: dict[str, list[LocalParam]] = defaultdict(list)
        expert_names = set()
        for instance in self._declared(range(self.config.num_layers), mine, first=True, last=True):
            if instance.declared.rollout is not None:
                sharing = expert_tp if instance.declared.is_expert else tp
                shard = self._rollout_shard(instance, sharing, tp_rank % sharing, vocab_multiple)
                params[shard.name].append(shard)
                if instance.declared.is_expert:
                    expert_names.add(shard.name)
        return [partition.stacked(n, parts) if n in expert_names else parts[0] for n, parts in params.items()]

    def layer_rollout_names(self, layer: int) -> dict[str, str]:
        """Return the engine's names of a decoder layer's parameters.

        Keys are Megatron's names after ``decoder.layers.<n>.``, ``{expert}`` included, which all families share.
        """
        return {
            declared.megatron.removeprefix(LAYER_PREFIX): declared.rollout.format(layer=layer)
            for declared in self._layer
            if declared.rollout is not None and (declared.when is None or declared.when(self.config, layer))
        }

    def patterns(self, layout: ParallelLayout, tp: int, ep: int = 1, vocab_multiple: int = 1) -> list[ShardPattern]:
        """List the parameters that trainer and engine share, each for all layers and experts.

        The engine's arguments are those of :meth:`rollout_params`, likewise the errors.
        """
        expert_tp, _ = self._rollout_experts(tp, ep)
        tied = layout.pp > 1 and TIED_LM_HEAD in self._output
        result = []
        for declared in (EMBEDDING, *self._tower, *self._layer, FINAL_NORM, *self._output):
            layers = tuple(self._layers_with(declared))
            if declared.rollout is None or not layers:
                continue
            instance, is_expert = ParameterInstance(declared, layers[0]), declared.is_expert
            sharing = expert_tp if is_expert else tp
            whole = declared.split in (Split.REPLICATED, Split.FIRST)
            sources = 1 if whole else layout.expert_tp if is_expert else layout.tp
            result.append(
                ShardPattern(
                    declared.megatron,
                    TIED_LM_HEAD.megatron if tied and declared is EMBEDDING else None,
                    declared.rollout,
                    declared.stage,
                    layers,
                    len(self._all_experts) if is_expert else 0,
                    declared.float32,
                    declared.is_linear,
                    tuple(self._megatron_shard(instance, layout, n).pieces for n in range(sources)),
                    tuple(self._rollout_shard(instance, sharing, n, vocab_multiple).pieces for n in range(sharing)),
                )
            )
        return result

    def is_float32(self, hf_name: str) -> bool:
        """Return whether a Hugging Face tensor is float32 in every weight dtype."""
        return hf_name in self._float32

    def is_linear(self, rollout_name: str) -> bool:
        """Return whether a parameter of the engine is a matrix of attention, an MLP or experts."""
        return rollout_name in self._linear

    @cached_property
    def _linear(self) -> frozenset[str]:
        layers = ((declared, self._layers_with(declared)) for declared in self._layer if declared.is_linear)
        return frozenset(str(declared.rollout).format(layer=layer) for declared, used in layers for layer in used)

    @cached_property
    def _float32(self) -> frozenset[str]:
        instances = self._declared(range(self.config.num_layers), range(0), first=False, last=False)
        return frozenset(t.name for instance in instances if instance.declared.float32 for t in self._tensors(instance))

    def _layers_with(self, declared: Declaration) -> Iterator[int]:
        if declared.stage is not PipelineStage.LAYER:
            yield 0
            return
        for layer in range(self.config.num_layers):
            if declared.when is None or declared.when(self.config, layer):
                yield layer

    def _rollout_shard(self, instance: ParameterInstance, sharing: int, rank: int, vocab_multiple: int) -> LocalParam:
        """Shard of an instance on one of the ``sharing`` engine ranks, without vocabulary padding."""
        assert instance.declared.rollout is not None
        name = instance.declared.rollout.format(layer=instance.layer)
        if instance.declared.engine_split is not None:
            (tensor,) = self._tensors(instance)
            return self._engine_shard(name, tensor, instance.declared.engine_split, sharing, rank)
        if instance.declared.split in (Split.GROUPED, Split.GATED):
            return partition.heads_shard(name, self._tensors(instance), self.config.num_key_value_heads, sharing, rank)
        shard = self._shard(name, instance, sharing, rank, self._rollout_vocab(sharing, vocab_multiple))
        if instance.declared.split is Split.FIRST and rank:
            return shard._replace(pieces=())
        if instance.declared.split is Split.VOCAB:
            rows = shard.pieces[0].local_shape[0] if shard.pieces else 0
            return shard._replace(shape=(rows, *shard.shape[1:]))
        return shard

    def _rollout_vocab(self, tp: int, multiple: int) -> int:
        """Rows of the engine's vocabulary, with padding."""
        rows = -(-self.config.vocab_size // multiple) * multiple
        if multiple > 1 and rows % tp:
            raise ValueError(f"{tp} engine ranks do not divide the vocabulary, which the engine pads to {rows} rows")
        return -(-rows // tp) * tp

    def _rollout_experts(self, tp: int, ep: int) -> tuple[int, int]:
        """Number of engine ranks that share an expert, and number of experts per rank."""
        experts = len(self._all_experts)
        if tp % ep or experts % ep:
            raise ValueError(
                f"rollout expert parallelism ep={ep} must divide tensor parallelism tp={tp} and the {experts} experts"
            )
        return tp // ep, experts // ep

    @property
    def _all_experts(self) -> range:
        return range(self.config.experts.count if self.config.experts is not None else 0)

    def _declared(
        self, layers: Iterable[int], experts: Sequence[int], first: bool, last: bool
    ) -> Iterator[ParameterInstance]:
        if first:
            yield ParameterInstance(EMBEDDING)
            yield from map(ParameterInstance, self._tower)
        for layer in layers:
            for declared in self._layer:
                if declared.when is None or declared.when(self.config, layer):
                    numbers = experts if declared.is_expert else (0,)
                    yield from (ParameterInstance(declared, layer, number) for number in numbers)
        if last:
            yield ParameterInstance(FINAL_NORM)
            yield from (ParameterInstance(declared) for declared in self._output)

    def _held(self, layout: ParallelLayout, rank: int) -> Iterator[ParameterInstance]:
        """Parameter instances on a training rank: its pipeline stage and its share of the experts."""
        stage, expert_rank = layout.coordinate(rank).pp, layout.expert_coordinate(rank).ep
        first, last = stage == 0, stage == layout.pp - 1
        share = len(self._all_experts) // layout.ep
        experts = self._all_experts[expert_rank * share : (expert_rank + 1) * share]
        for instance in self._declared(layout.stage_layers(self.config.num_layers, stage), experts, first, last):
            if not (instance.declared.tied_copy and first):
                yield instance

    def _megatron_shard(self, instance: ParameterInstance, layout: ParallelLayout, rank: int) -> LocalParam:
        name = instance.declared.megatron.format(layer=instance.layer, expert=instance.expert)
        if instance.declared.is_expert:
            return self._shard(name, instance, layout.expert_tp, layout.expert_coordinate(rank).etp, 0)
        tp, tp_rank = layout.tp, layout.coordinate(rank).tp
        if instance.declared.split is Split.GROUPED:
            groups = self.config.num_key_value_heads
            return partition.grouped_shard(name, self._tensors(instance), groups, tp, tp_rank)
        if instance.declared.split is Split.GATED:
            groups, heads = self.config.num_key_value_heads, self.config.num_attention_heads
            return partition.gated_shard(name, self._tensors(instance), groups, heads, tp, tp_rank)
        if instance.declared.split is Split.SECTIONS_BY_HEAD:
            return self._sectioned(name, instance, tp, tp_rank)
        return self._shard(name, instance, tp, tp_rank, self.padded_vocab(tp))

    def _shard(self, name: str, instance: ParameterInstance, tp: int, tp_rank: int, padded: int) -> LocalParam:
        tensors = self._tensors(instance)
        match instance.declared.split:
            case Split.REPLICATED | Split.FIRST:
                return partition.replicated(name, tensors)
            case Split.COLUMN | Split.SECTIONS_BY_HEAD:
                return partition.column_shard(name, tensors, tp, tp_rank)
            case Split.SECTIONS:
                return self._sectioned(name, instance, tp, tp_rank)
            case Split.ROW:
                return partition.row_shard(name, tensors[0], tp, tp_rank)
            case Split.VOCAB:
                return partition.vocab_shard(name, tensors[0], padded, tp, tp_rank)
            case Split.GROUPED | Split.GATED:
                raise AssertionError("the trainer and the engine order these rows differently")

    def _engine_shard(self, name: str, tensor: FullTensor, split: EngineSplit, sharing: int, rank: int) -> LocalParam:
        """Shard of a vision tower's parameter on one of the ``sharing`` engine ranks."""
        assert self.config.vision is not None
        if split.split is Split.SECTIONS:  # queries, keys and values of all heads
            heads = count(self.config.vision.settings, "num_heads")
            sections = partition.Sections(heads, (tensor.shape[0] // (3 * heads),) * 3, grouped=False)
            return partition.sectioned_shard(name, [(tensor, sections)], sharing, rank)
        padded = split.padded(tensor.shape[split.dimension])
        return partition.trimmed_shard(name, tensor, split.dimension, padded, sharing, rank)

    def _sectioned(self, name: str, instance: ParameterInstance, tp: int, tp_rank: int) -> LocalParam:
        """Shard of sections of heads, one section after the other."""
        linear, declared = self.config.linear, instance.declared
        assert linear is not None
        heights, grouped = head_sections(linear), declared.split is Split.SECTIONS_BY_HEAD
        sections = [partition.Sections(linear.key_heads, heights[str(t.dims[0])], grouped) for t in declared.hf]
        pairs = list(zip(self._tensors(instance), sections, strict=True))
        return partition.sectioned_shard(name, pairs, tp, tp_rank)

    def _tensors(self, instance: ParameterInstance) -> list[FullTensor]:
        numbers = {"layer": instance.layer, "expert": instance.expert}
        tensors = ((tensor.name.format(**numbers), tensor.dims) for tensor in instance.declared.hf)
        return [
            FullTensor(name, tuple(dim if isinstance(dim, int) else self._sizes[dim] for dim in dims))
            for name, dims in tensors
        ]


def dimension_sizes(config: ModelConfig) -> Mapping[str, int]:
    """Return the size of each dimension name that a declaration may use."""
    sizes = {
        "hidden": config.hidden_size,
        "q": config.num_attention_heads * config.head_dim,
        "q_and_gate": 2 * config.num_attention_heads * config.head_dim,
        "kv": config.num_key_value_heads * config.head_dim,
        "head": config.head_dim,
        "heads": config.num_attention_heads,
        "ffn": config.ffn_hidden_size,
        "vocab": config.vocab_size,
        "one": 1,
    }
    if config.experts is not None:
        sizes["experts"] = config.experts.count
        sizes["expert_ffn"] = config.experts.ffn_hidden_size
        sizes["expert_gate_up"] = 2 * config.experts.ffn_hidden_size
        sizes["shared_ffn"] = config.experts.shared_ffn_hidden_size
    if config.latent is not None:
        latent = config.latent
        sizes["q_latent"] = latent.q_lora_rank
        sizes["kv_latent"] = latent.kv_lora_rank
        sizes["kv_latent_and_rope"] = latent.kv_lora_rank + latent.rope_dim
        sizes["kv_unpacked"] = config.num_attention_heads * (latent.nope_dim + latent.v_dim)
        sizes["v"] = config.num_attention_heads * latent.v_dim
    if config.linear is not None:
        linear = config.linear
        sizes["conv"] = linear.conv_width
        sizes["linear_heads"] = linear.value_heads
        sizes["linear_head"] = linear.value_dim
        sizes |= {name: linear.key_heads * sum(rows) for name, rows in head_sections(linear).items()}
    return sizes


def head_sections(linear: LinearAttention) -> Mapping[str, tuple[int, ...]]:
    """Return the rows that each key head has in the sections of a dimension, by dimension name.

    ``q`` and ``k`` are a key head's query and key, ``v`` and ``z`` the values and output gates of its value heads,
    ``b`` their learning rates, ``a`` their decays.
    """
    key, values, heads = linear.key_dim, linear.values_per_key * linear.value_dim, linear.values_per_key
    return {
        "linear_qkvz": (key, key, values, values),
        "linear_qkv": (key, key, values),
        "linear_z": (values,),
        "linear_ba": (heads, heads),
        "linear_b": (heads,),
        "linear_a": (heads,),
    }
