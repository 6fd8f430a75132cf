"""Floating-point operations, by layer and pipeline stage, of the passes of a training step.

The operations of a layer are those of :mod:`megarl.models.sequence_cost`, which the driver balances ranks by: two for
each weight that a token meets and, in causal attention, those of half of all pairs of tokens. Summed over the layers
of a dense model with as many key-value heads as query heads this is the usual ``2 N`` per token of a forward pass, and
with PaLM's term for attention (appendix B of https://arxiv.org/abs/2204.02311), halved for causality,
``6 N + 6 L H Q T`` of forward and backward. A backward pass takes twice a forward pass; what it computes again is told
apart, since it is no part of the model's own operations (MFU against HFU).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megarl.models import ModelConfig
from megarl.models.sequence_cost import SequenceCost, head_cost, layer_cost
from megarl.plan.hardware import Hardware
from megarl.plan.job import PlannedRole
from megarl.plan.lengths import Ints

BACKWARD = 2
"""A backward pass in forward passes."""


class Rows(NamedTuple):
    """What of a set of sequences matters for the work they are.

    Attributes:
        sequences: how many.
        tokens: of all of them.
        squares: sum of the squares of their lengths.
        outputs: response tokens, of which log-probs or values are taken.
    """

    sequences: float
    tokens: float
    squares: float
    outputs: float

    @classmethod
    def of(cls, prompts: Ints, responses: Ints) -> Rows:
        """Of sequences that are prompt and response."""
        lengths = (prompts + responses).astype(np.float64)
        return cls(len(lengths), float(lengths.sum()), float((lengths**2).sum()), float(responses.sum()))

    def part(self, share: float) -> Rows:
        """A share of them with the same distribution."""
        return Rows(*(share * value for value in self))


class Work(NamedTuple):
    """Floating-point operations.

    Attributes:
        products: of products with weights that every token meets.
        experts: of products with the weights of routed experts, many small ones.
        attention: of attention's products of tokens with tokens.
    """

    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """All."""
        return sum(self)

    def plus(self, other: Work) -> Work:
        """The sum, kind by kind."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Work:
        """Multiplied."""
        return Work(*(factor * value for value in self))

    def seconds(self, hardware: Hardware, dtype: str) -> float:
        """Seconds that one device needs for them."""
        return (
            hardware.products_s(self.products, dtype)
            + hardware.experts_s(self.experts, dtype)
            + hardware.attention_s(self.attention, dtype)
        )


def forward_work(role: PlannedRole, rows: Rows, layers: Sequence[int], *, with_head: bool) -> Work:
    """Operations of a forward pass through some layers, over all devices that share it."""
    costs = _costs(role.model)
    linear, quadratic = (sum(column) for column in zip(*(costs[layer] for layer in layers), (0.0, 0.0), strict=True))
    experts = expert_operations(role.model) * sum(role.model.has_experts(layer) for layer in layers)
    products = (linear - experts) * rows.tokens
    if with_head:
        products += head_cost(role.model, value_head=role.value_head).linear * rows.outputs
    return Work(products, experts * rows.tokens, quadratic * rows.squares)


def expert_operations(model: ModelConfig) -> float:
    """Operations of a token with its routed experts, in a layer that has some."""
    experts = model.experts
    return 6.0 * experts.per_token * model.hidden_size * experts.ffn_hidden_size if experts else 0.0


def model_work(role: PlannedRole, rows: Rows, *, updates: bool) -> Work:
    """The model's own operations on rows, by which MFU is counted: nothing that is computed again."""
    whole = forward_work(role, rows, range(role.model.num_layers), with_head=True)
    return whole.times(1 + BACKWARD if updates else 1)


def recomputed_work(role: PlannedRole, rows: Rows, layers: Sequence[int]) -> Work:
    """Operations that the backward pass does again, as ``recompute_granularity`` asks."""
    megatron = role.megatron
    if megatron.recompute_granularity is None:
        return Work()
    if megatron.recompute_granularity == "full":
        again = list(layers)
        if megatron.recompute_method == "block":
            again = again[: megatron.recompute_num_layers or 1]
        return forward_work(role, rows, again, with_head=False)
    return _selected_work(role.model, rows, layers, megatron.recompute_modules)


def _selected_work(model: ModelConfig, rows: Rows, layers: Sequence[int], modules: Sequence[str]) -> Work:
    work = Work()
    for layer in layers:
        with_experts = model.has_experts(layer)
        if "core_attn" in modules:
            work = work.plus(Work(attention=layer_cost(model, layer).quadratic * rows.squares))
        if "mlp" in modules and not with_experts:
            work = work.plus(Work(6.0 * model.hidden_size * model.ffn_hidden_size * rows.tokens))
        if "moe" in modules and with_experts and model.experts is not None:
            shared = 6.0 * model.hidden_size * model.experts.shared_ffn_hidden_size
            work = work.plus(Work(shared * rows.tokens, expert_operations(model) * rows.tokens))
        if "mla_up_proj" in modules and model.latent is not None:
            latent = model.latent
            expanded = latent.kv_lora_rank * (latent.nope_dim + latent.v_dim) + latent.q_lora_rank * model.head_dim
            work = work.plus(Work(2.0 * model.num_attention_heads * expanded * rows.tokens))
    return work


class Elements(NamedTuple):
    """Weights of a rank, in elements: those that all data-parallel ranks share, and those of routed experts."""

    shared: float
    experts: float

    @property
    def total(self) -> float:
        """Both."""
        return self.shared + self.experts


def rank_elements(role: PlannedRole, stage: int) -> Elements:
    """Weights of each rank of a pipeline stage, norms and padding left out (well below a thousandth)."""
    model, layout = role.model, role.layout
    shared, routed = layers_elements(model, layout.stage_layers(model.num_layers, stage))
    if stage == 0:
        shared += model.vocab_size * model.hidden_size
    if stage == layout.pp - 1 and not role.value_head and not (model.tie_word_embeddings and layout.pp == 1):
        shared += model.vocab_size * model.hidden_size
    return Elements(shared / layout.tp, routed / (layout.ep * layout.expert_tp))


def optimized_elements(role: PlannedRole, held: Elements) -> float:
    """Elements whose optimizer state a rank has, of the weights that it holds: its share, where that is distributed."""
    layout = role.layout
    if not role.megatron.use_distributed_optimizer:
        return held.total
    return held.shared / (layout.dp * layout.cp) + held.experts / layout.expert_dp


def layers_elements(model: ModelConfig, layers: Iterable[int]) -> tuple[float, float]:
    """Weights of whole layers: without their routed experts, and theirs."""
    kinds: dict[bool, list[int]] = {False: [], True: []}  # layers of a kind are alike
    for layer in layers:
        kinds[model.has_experts(layer)].append(layer)
    found = [(len(alike), *layer_elements(model, alike[0])) for alike in kinds.values() if alike]
    return sum(count * own for count, own, _ in found), sum(count * routed for count, _, routed in found)


def layer_elements(model: ModelConfig, layer: int) -> tuple[float, float]:
    """Weights of a whole layer: without its routed experts, and theirs."""
    met, experts = layer_cost(model, layer).linear / 2, model.experts
    if experts is None or not model.has_experts(layer):
        return met, 0.0
    one = 3.0 * model.hidden_size * experts.ffn_hidden_size
    return met - experts.per_token * one, experts.count * one


def _costs(model: ModelConfig) -> list[SequenceCost]:
    """Of every layer; those with experts cost the same, and so do those without."""
    kinds: dict[bool, SequenceCost] = {}
    flags = [model.has_experts(layer) for layer in range(model.num_layers)]
    for layer, flag in enumerate(flags):
        if flag not in kinds:
            kinds[flag] = layer_cost(model, layer)
    return [kinds[flag] for flag in flags]
