"""Cost of generation on a replica of the rollout engine.

Each decode step costs the longer of reading and computing, plus the collectives of its layers. A replica decodes as
many sequences at a time as its slots and its KV cache hold, until all are done; the longest response bounds the number
of steps from below. Prefill computes a prompt once for all of its samples where the engine caches prefixes.
"""

from __future__ import annotations

from megarl.config.schema.jobs import ROLLOUT
from megarl.models.sequence_cost import sequence_cost
from megarl.ops.plan.flops import layers_elements
from megarl.ops.plan.hardware import CollectiveGroup, Hardware
from megarl.ops.plan.job import PlannedJob, PlannedRollout
from megarl.ops.plan.kv_cache import bytes_per_sequence, bytes_per_token
from megarl.ops.plan.lengths import Lengths
from megarl.ops.plan.pass_costs import Cost, PhaseCost


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
    # A response token attends to the prompt and to all previous tokens.
    pairs = prompt**2 / shared + response * (2 * prompt + response)
    flops = rollout.samples * (model.flops.linear * (prompt / shared + response) + model.attention * pairs)
    return PhaseCost.of("gen", cost, flops, len(job.pool_of(ROLLOUT).numbers), hardware)
