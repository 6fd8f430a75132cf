"""FLOPs of the passes of a training step, for mean sequence lengths, and costs by cause.

FLOPs of a layer come from :mod:`megarl.models.sequence_cost`, which also balances ranks: two per weight and token, plus
those of half of all token pairs in causal attention. For a dense model with as many key-value heads as query heads,
this is the usual ``2 N`` per token of a forward pass. With PaLM's attention term (appendix B of
https://arxiv.org/abs/2204.02311), halved for causality, forward and backward take ``6 N + 6 L H Q T``. A backward pass
costs two forward passes. Recomputed FLOPs are counted separately, as the difference between MFU and HFU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megarl.base.errors import ConfigError
from megarl.config import SupervisedConfig, TrainConfig
from megarl.models import ModelConfig
from megarl.models.sequence_cost import SequenceCost, head_cost, layer_cost
from megarl.models.tower_class import tower_parameters
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedRole

BACKWARD = 2  # cost of a backward pass, in forward passes


class Lengths(NamedTuple):
    """Tokens of a prompt and of a response; a supervised job has sequences of ``response`` tokens, without prompts."""

    prompt: float  # mean tokens of a prompt
    response: float  # mean tokens of a response
    longest: float  # tokens of the longest response of a step
    origin: str  # where the numbers come from, in words

    def describe(self) -> str:
        """Describe the lengths in one line."""
        if not self.prompt:
            return f"sequences of {self.response:,.0f} tokens ({self.origin})"
        return f"prompts of {self.prompt:,.0f} tokens, responses of {self.response:,.0f} ({self.origin})"


def lengths_of(config: TrainConfig | SupervisedConfig, text: str | None = None) -> Lengths:
    """Return mean lengths, at most those that the configuration allows.

    Args:
        text: ``PROMPT,RESPONSE``, or ``LENGTH`` for a supervised job; None = the longest allowed.

    Raises:
        ConfigError: the text is not of this form, or a length is not positive.
    """
    if isinstance(config, SupervisedConfig):
        limits = [config.data.max_length]
    else:
        limits = [config.data.max_prompt_length, config.data.max_response_length]
    means, origin = [float(limit) for limit in limits], "the longest allowed; change with --lengths"
    if text is not None:
        try:
            means, origin = [float(part) for part in text.split(",")], "--lengths"
        except ValueError:
            means = []
        if len(means) != len(limits) or not all(mean >= 1 for mean in means):
            form = "one number" if len(limits) == 1 else "two numbers, mean tokens of prompts and responses,"
            raise ConfigError(f"--lengths={text}: expected {form} of at least 1", code="plan.lengths")
        means = [min(mean, float(limit)) for mean, limit in zip(means, limits, strict=True)]
    return Lengths(means[0] if len(means) > 1 else 0.0, means[-1], float(limits[-1]), origin)


class SequenceStats(NamedTuple):
    """Sums over a set of sequences that determine their FLOPs."""

    sequences: float
    tokens: float
    squares: float  # sum of squared lengths
    outputs: float  # response tokens, whose log-probs or values are computed
    windowed: float = 0.0  # as squares, for attention within the model's sliding window

    @classmethod
    def of(cls, sequences: float, prompt: float, response: float, model: ModelConfig) -> SequenceStats:
        """Return the sums of sequences with equal lengths of prompt and response."""
        length = prompt + response
        beyond = max(0.0, length - model.window.size) if model.window else length
        squares, windowed = length**2, length**2 - beyond**2
        return cls(*(sequences * value for value in (1.0, length, squares, response, windowed)))

    def part(self, share: float) -> SequenceStats:
        """Return the sums of a fraction of the sequences."""
        return SequenceStats(*(share * value for value in self))


def forward_flops(role: PlannedRole, rows: SequenceStats, layers: Sequence[int], *, with_head: bool) -> float:
    """Return the FLOPs of a forward pass through some layers, over all devices that share it."""
    costs = _costs(role.model)
    flops = sum(costs[layer].linear * rows.tokens + _attention_flops(costs[layer], rows) for layer in layers)
    if with_head:
        flops += head_cost(role.model, value_head=role.value_head).linear * rows.outputs
    return flops


def _attention_flops(cost: SequenceCost, rows: SequenceStats) -> float:
    """Return the FLOPs of products between tokens, and of those with the states of gated delta nets."""
    return cost.quadratic * rows.squares + cost.windowed * rows.windowed + cost.recurrent * rows.tokens


def model_flops(role: PlannedRole, rows: SequenceStats, *, updates: bool) -> float:
    """Return the model FLOPs of sequences, which MFU is computed from; recomputation is not counted."""
    forward = forward_flops(role, rows, range(role.model.num_layers), with_head=True)
    return forward * (1 + BACKWARD if updates else 1)


def recomputed_flops(role: PlannedRole, rows: SequenceStats, layers: Sequence[int]) -> float:
    """Return the FLOPs that the backward pass recomputes under ``recompute_granularity``."""
    megatron = role.megatron
    if megatron.recompute_granularity is None:
        return 0.0
    if megatron.recompute_granularity == "full":
        recomputed = list(layers)
        if megatron.recompute_method == "block":
            recomputed = recomputed[: megatron.recompute_num_layers or 1]
        return forward_flops(role, rows, recomputed, with_head=False)
    return sum(_selective_flops(role.model, rows, layer, megatron.recompute_modules) for layer in layers)


def _selective_flops(model: ModelConfig, rows: SequenceStats, layer: int, modules: Sequence[str]) -> float:
    flops, per_weight, experts = 0.0, 6.0 * model.hidden_size * rows.tokens, model.experts
    if "core_attn" in modules:
        flops += _attention_flops(layer_cost(model, layer), rows)
    if "mlp" in modules and not model.has_experts(layer):
        flops += per_weight * model.ffn_hidden_size
    if "moe" in modules and experts is not None and model.has_experts(layer):
        flops += per_weight * (experts.shared_ffn_hidden_size + experts.per_token * experts.ffn_hidden_size)
    return flops


class Elements(NamedTuple):
    """Weight elements of a rank: dense weights and weights of routed experts."""

    shared: float
    experts: float

    @property
    def total(self) -> float:
        """Dense and expert elements."""
        return self.shared + self.experts


def rank_elements(role: PlannedRole, stage: int) -> Elements:
    """Return the weight elements of each rank of a stage; norms and padding (below 0.1 %) are not counted."""
    model, layout = role.model, role.layout
    shared, routed = layers_elements(model, layout.stage_layers(model.num_layers, stage))
    if stage == 0:
        shared += model.vocab_size * model.hidden_size
    if stage == layout.pp - 1 and not role.value_head and not (model.tie_word_embeddings and layout.pp == 1):
        shared += model.vocab_size * model.hidden_size
    tower = tower_parameters(model.vision) if stage == 0 and model.vision and role.trains_tower else 0
    return Elements(shared / layout.tp + tower, routed / (layout.ep * layout.expert_tp))


def optimized_elements(role: PlannedRole, held: Elements) -> float:
    """Return the elements whose optimizer state a rank holds: all, or its share with the distributed optimizer."""
    layout = role.layout
    if not role.megatron.use_distributed_optimizer:
        return held.total
    return held.shared / (layout.dp * layout.cp) + held.experts / layout.expert_dp


def layers_elements(model: ModelConfig, layers: Iterable[int]) -> tuple[float, float]:
    """Return the weight elements of whole layers: dense and routed-expert elements."""
    kinds = defaultdict[tuple[bool, bool], list[int]](list)  # layers of a kind have equal sizes
    for layer in layers:
        kinds[model.has_experts(layer), model.is_linear(layer)].append(layer)
    sizes = [(len(members), *layer_elements(model, members[0])) for members in kinds.values()]
    return sum(count * dense for count, dense, _ in sizes), sum(count * routed for count, _, routed in sizes)


def layer_elements(model: ModelConfig, layer: int) -> tuple[float, float]:
    """Return the weight elements of a whole layer: dense and routed-expert elements."""
    used, experts = layer_cost(model, layer).linear / 2, model.experts
    if experts is None or not model.has_experts(layer):
        return used, 0.0
    per_expert = 3.0 * model.hidden_size * experts.ffn_hidden_size
    return used - experts.per_token * per_expert, experts.count * per_expert


def _costs(model: ModelConfig) -> list[SequenceCost]:
    """Return the cost of every layer; layers of the same kind share one value."""
    kinds: dict[tuple[bool, bool, bool], SequenceCost] = {}
    flags = [(model.has_experts(n), model.has_window(n), model.is_linear(n)) for n in range(model.num_layers)]
    for layer, flag in enumerate(flags):
        if flag not in kinds:
            kinds[flag] = layer_cost(model, layer)
    return [kinds[flag] for flag in flags]


class Cost(NamedTuple):
    """Cost by cause."""

    compute: float = 0.0  # matrix products and attention
    memory: float = 0.0  # reading weights, optimizer steps, and the KV cache, where that takes longer than computing
    parallel: float = 0.0  # collectives and sends between tensor, context, expert and pipeline parallel ranks
    bubble: float = 0.0  # pipeline bubble
    data: float = 0.0  # gradient reduction and weight gather between data-parallel ranks
    host: float = 0.0  # copies of offloaded states
    latency: float = 0.0  # latencies, independent of sizes
    transfer: float = 0.0  # weight sync

    @property
    def total(self) -> float:
        """Sum over all causes."""
        return sum(self)

    def plus(self, other: Cost) -> Cost:
        """Return the sum of two costs, by cause."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Cost:
        """Return the cost multiplied by a factor."""
        return Cost(*(factor * value for value in self))


class PhaseCost(NamedTuple):
    """Cost of a phase over all samples of a training step."""

    phase: str
    cost: Cost  # cost by cause; seconds, if the hardware is calibrated
    flops: float  # model FLOPs, over all devices
    devices: int  # number of devices of the phase: those of its roles' pool

    @classmethod
    def of(cls, phase: str, at_peak: Cost, flops: float, devices: int, hardware: Hardware) -> PhaseCost:
        """Return the cost of a phase from its cost at peak speeds."""
        return cls(phase, at_peak.times(1 / hardware.efficiency(phase)), flops, devices)

    def plus(self, other: PhaseCost) -> PhaseCost:
        """Return the cost of two passes of this phase, one after the other."""
        return self._replace(cost=self.cost.plus(other.cost), flops=self.flops + other.flops)
