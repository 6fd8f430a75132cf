"""KV cache of a rollout replica, and the cost of its generation.

Each decode step costs the longer of reading and computing, plus the collectives of its layers. A replica decodes as
many sequences at a time as its slots and its KV cache hold, until all are done; the longest response bounds the number
of steps from below. Prefill computes a prompt once for all of its samples where the engine caches prefixes.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.base.formatting import DTYPE_BYTES
from megarl.config.schema.jobs import ROLLOUT
from megarl.models import ModelConfig
from megarl.models.sequence_cost import sequence_cost, tower_flops
from megarl.ops.plan.flops import Cost, Lengths, PhaseCost, layers_elements
from megarl.ops.plan.hardware import CollectiveGroup, Hardware
from megarl.ops.plan.job import PlannedJob, PlannedRollout
from megarl.ops.plan.states import FLOAT32
from megarl.rollout.settings import FreeMemory, default_fraction, shared_fraction
from megarl.rollout.sglang.options import FRACTION

LENGTH_MULTIPLE = 32  # the embedded engine rounds its slot length up to a multiple of this number of tokens
CPU_TOKENS = 2**16  # tokens in SGLang's KV cache on a CPU, as megarl sets it


class KVCacheCapacity(NamedTuple):
    """KV cache on the devices of one replica."""

    tokens: int  # capacity over all sequences; 0 if no memory is left
    bytes_per_token: int  # bytes per token on one device
    nbytes: int  # bytes on one device, with the states of gated delta nets
    sequences: int  # capacity in sequences of maximum length
    how: str  # the setting that determines the size, in words


def bytes_per_token(model: ModelConfig, tp: int, width: int) -> int:
    """Return the KV cache bytes of one token, in all layers on one rank.

    With latent attention, the cache holds the latent instead of keys and values. Gated delta nets have none.
    """
    layers = len(model.attention_layers)
    if model.latent is not None:
        return layers * (model.latent.kv_lora_rank + model.latent.rope_dim) * width
    return layers * 2 * max(1, model.num_key_value_heads // tp) * model.head_dim * width


def bytes_per_sequence(model: ModelConfig, tp: int, width: int) -> int:
    """Return the bytes of one sequence's states of gated delta nets, in all layers on one rank; 0 without them."""
    linear = model.linear
    if linear is None:
        return 0
    matrices = FLOAT32 * linear.value_heads * linear.key_dim * linear.value_dim
    inputs = width * (linear.conv_width - 1) * linear.mixed_width
    return sum(linear.layers) * (matrices + inputs) // tp


def kv_cache_capacity(
    rollout: PlannedRollout, weights: int, other_roles: int, device_bytes: int | None, device: str
) -> KVCacheCapacity | None:
    """Return the KV cache of one replica.

    Args:
        weights: bytes of its weights on one device.
        other_roles: bytes of other roles on that device during generation.
        device_bytes: memory of the device; None = unknown.

    Returns:
        None if the size depends on an unknown device memory.
    """
    width = DTYPE_BYTES[rollout.config.dtype]
    per_token = bytes_per_token(rollout.model, rollout.tp, width)
    if rollout.config.name == "embedded":
        length = -(-(rollout.longest - 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        slots = min(rollout.config.max_num_seqs, -(-rollout.samples // rollout.replicas))
        tokens = slots * length
        nbytes = tokens * per_token + slots * bytes_per_sequence(rollout.model, rollout.tp, width)
        return KVCacheCapacity(
            tokens, per_token, nbytes, slots, "slots for the longest trajectory, rollout.max_num_seqs"
        )
    states = rollout.config.max_num_seqs * bytes_per_sequence(rollout.model, rollout.tp, width)
    args = rollout.config.engine_kwargs.sglang.server_args
    max_tokens = args.get("max_total_tokens", CPU_TOKENS if device == "cpu" else None)
    if device == "cpu" or device_bytes is None:
        if max_tokens is None:
            return None
        return _of_tokens(int(max_tokens), per_token, rollout, f"max_total_tokens={max_tokens}", states)
    free = FreeMemory(device_bytes - other_roles, device_bytes)
    fraction = args.get(FRACTION)
    if fraction is None:
        if rollout.own_devices:
            fraction = default_fraction(device_bytes, rollout.tp)
        else:
            keeps_memory = not rollout.config.free_cache_engine
            fraction = shared_fraction([free] * rollout.tp, 0, keeps_memory=keeps_memory)
    # The fraction applies to the memory that is free when the engine starts; weights are taken out first.
    available = int(free.free * fraction) - weights - states
    tokens = max(0, available) // per_token
    if max_tokens is not None and max_tokens < tokens:
        return _of_tokens(int(max_tokens), per_token, rollout, f"max_total_tokens={max_tokens}", states)
    return _of_tokens(tokens, per_token, rollout, f"{FRACTION}={fraction:g}", states)


def _of_tokens(tokens: int, per_token: int, rollout: PlannedRollout, how: str, states: int = 0) -> KVCacheCapacity:
    return KVCacheCapacity(tokens, per_token, tokens * per_token + states, tokens // rollout.longest, how)


class EngineModel:
    """Model of prefill and decode steps of one replica; on a CPU kernels are launched one by one, without graphs."""

    def __init__(self, rollout: PlannedRollout, hardware: Hardware, devices_per_node: int, *, on_cpu: bool) -> None:
        self.model, self.tp, self.hardware = rollout.model, rollout.tp, hardware
        self.dtype, self.width = rollout.config.dtype, rollout.dtype_bytes
        self.group = CollectiveGroup(rollout.tp, 1, devices_per_node)
        self.flops = sequence_cost(rollout.model)
        # An upper bound with sliding windows: all earlier tokens are counted, and cached.
        self.attention = self.flops.quadratic + self.flops.windowed
        model, head = rollout.model, rollout.model.vocab_size * rollout.model.hidden_size
        shared, routed = layers_elements(model, range(model.num_layers))
        in_layers = 1 if rollout.holds_fp8 else self.width
        self.shared_bytes = (shared * in_layers + head * self.width) / rollout.tp
        self.expert_bytes = routed * in_layers / rollout.tp
        self.kv_bytes = bytes_per_token(model, rollout.tp, self.width)
        self.state_bytes = bytes_per_sequence(model, rollout.tp, self.width)
        launched = on_cpu or rollout.config.name == "embedded"
        self.floor_s = model.num_layers * hardware.latency.layer_us * 1e-6 if launched else 0.0

    def prefill(self, prompts: float, tokens: float) -> Cost:
        """Return the cost of prompts of ``tokens`` tokens; only the last token of a prompt needs logits."""
        head = 2.0 * self.model.vocab_size * self.model.hidden_size
        flops = prompts * tokens * (self.flops.linear - head + self.flops.recurrent + self.attention * tokens)
        hidden = prompts * tokens * self.model.hidden_size * self.width
        parallel = 2 * self.model.num_layers * self.group.reduce_s(hidden, self.hardware)
        return Cost(compute=self.hardware.compute_s(flops / self.tp, self.dtype), parallel=parallel)

    def step(self, running: float, context: float) -> Cost:
        """Return the cost of a decode step of sequences with ``context`` cached tokens each."""
        states = 2 * self.state_bytes  # read and written
        experts, layers = self.model.experts, self.model.num_layers
        # The share of a layer's experts that a step reads, with random routing.
        share = 0.0 if experts is None else 1.0 - (1.0 - experts.per_token / experts.count) ** running
        weights = self.shared_bytes + self.expert_bytes * share
        reading = self.hardware.reading_s(weights + running * (states + context * self.kv_bytes))
        # Queries of the new token with all keys and values; latent attention keeps these compressed.
        latent, heads = self.model.latent, self.model.num_attention_heads
        width = 2 * latent.kv_lora_rank + latent.rope_dim if latent else 2 * self.model.head_dim
        attended = 2.0 * len(self.model.attention_layers) * heads * width * context
        computing = self.hardware.compute_s(running * (self.flops.linear + attended) / self.tp, self.dtype)
        reduce_s = self.group.reduce_s(running * self.model.hidden_size * self.width, self.hardware)
        if self.tp > 1:  # a small all-reduce takes one all-to-all exchange, not the two rounds of a ring
            reduce_s -= self.hardware.latency_s(within_node=self.group.within_node)
        return Cost(
            compute=computing if computing > reading else 0.0,
            memory=0.0 if computing > reading else reading,
            parallel=2 * layers * reduce_s,
            latency=max(0.0, self.floor_s - max(reading, computing)),
        )


def generation_cost(
    job: PlannedJob, hardware: Hardware, lengths: Lengths, kv_tokens: float | None = None
) -> PhaseCost | None:
    """Return the cost of generation, with an unlimited KV cache if ``kv_tokens`` is None; None without an engine."""
    rollout = job.rollout
    if rollout is None or rollout.is_external:
        return None
    model = EngineModel(rollout, hardware, job.engine_devices_per_node, on_cpu=job.device == "cpu")
    prompt, response = lengths.prompt, lengths.response
    samples = rollout.samples / rollout.replicas
    slots = min(samples, float(rollout.config.max_num_seqs))
    if kv_tokens is not None:
        slots = max(1.0, min(slots, kv_tokens / (prompt + response)))
    steps = max(lengths.longest, samples * response / slots)
    running = samples * response / steps
    shared = rollout.samples_per_prompt if rollout.config.name == "sglang" else 1
    cost = model.prefill(samples / shared, prompt).plus(model.step(running, prompt + response / 2).times(steps))
    # One image fills each prompt, whose samples share its features.
    tower = rollout.prompts * tower_flops(rollout.model.vision, prompt) if rollout.model.vision else 0.0
    on_device = tower / (rollout.replicas * rollout.tp)
    cost = cost.plus(Cost(compute=hardware.compute_s(on_device, rollout.config.dtype)))
    # A response token attends to the prompt and to all previous tokens.
    pairs = prompt**2 / shared + response * (2 * prompt + response)
    flops = rollout.samples * (model.flops.linear * (prompt / shared + response) + model.attention * pairs) + tower
    return PhaseCost.of("gen", cost, flops, len(job.pool_of(ROLLOUT).numbers), hardware)
