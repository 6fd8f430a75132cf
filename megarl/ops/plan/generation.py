"""KV cache and generation time of a rollout replica, from a simulation of its continuous batching.

A decode step of ``B`` sequences reads the weights once and the keys and values of all previous tokens, and computes
``B`` tokens. It takes the longer of reading and computing, plus the collectives of its layers and the engine's fixed
overhead. Sequences leave the queue as soon as a slot is free and the KV cache has room; prefill runs at the speed of
large matrix products. This is continuous batching as in Orca (OSDI 2022). Towards the end few responses are left: steps
are short but far from the device's peak, and their time is the time to read the weights.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

from megarl.base.formatting import DTYPE_BYTES
from megarl.models import ModelConfig
from megarl.models.sequence_cost import sequence_cost
from megarl.ops.plan.flops import FlopCount, expert_flops, layers_elements
from megarl.ops.plan.hardware import CollectiveGroup, Hardware
from megarl.ops.plan.job import PlannedRollout
from megarl.ops.plan.lengths import Ints, Lengths
from megarl.ops.plan.pass_times import PassTime, TimeBreakdown
from megarl.ops.plan.states import FLOAT32
from megarl.rollout.sglang.memory import FRACTION, FreeMemory, default_fraction, shared_fraction

LENGTH_MULTIPLE = 32
"""The embedded engine rounds its slot length up to a multiple of this number of tokens."""
CPU_TOKENS = 2**16
"""Tokens in SGLang's KV cache on a CPU, as megarl sets it."""


class KVCacheCapacity(NamedTuple):
    """KV cache on the devices of one replica.

    Attributes:
        tokens: capacity over all sequences; 0 if no memory is left.
        bytes_per_token: bytes per token on one device.
        nbytes: bytes on one device, with the states of gated delta nets.
        sequences: capacity in sequences of maximum length.
        how: the setting that determines the size, in words.
    """

    tokens: int
    bytes_per_token: int
    nbytes: int
    sequences: int
    how: str


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
        rollout: the engine.
        weights: bytes of its weights on one device.
        other_roles: bytes of other roles on that device during generation.
        device_bytes: memory of the device; None = unknown.
        device: ``cpu`` or ``cuda``.

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


class GenerationTime(NamedTuple):
    """Result of the generation simulation.

    Attributes:
        prefill_s: seconds of prefill.
        decode_s: seconds of decode steps.
        steps: number of decode steps.
        mean_running: mean number of sequences per step.
        time: time of the phase; its FLOPs are those of all replicas.
    """

    prefill_s: float
    decode_s: float
    steps: int
    mean_running: float
    time: PassTime


class EngineTimer:
    """Times prefill and decode steps of one replica.

    Args:
        rollout: model, engine and sizes.
        hardware: hardware of the job.
        devices_per_node: devices per node of the cluster.
        on_cpu: whether the engine launches kernels one by one, without graphs.
    """

    def __init__(self, rollout: PlannedRollout, hardware: Hardware, devices_per_node: int, *, on_cpu: bool) -> None:
        self.model, self.tp, self.hardware = rollout.model, rollout.tp, hardware
        self.dtype, self.width = rollout.config.dtype, rollout.dtype_bytes
        self.group = CollectiveGroup(rollout.tp, 1, devices_per_node)
        self.cost = sequence_cost(rollout.model)
        # An upper bound with sliding windows: all earlier tokens are counted, and cached.
        self.attention = self.cost.quadratic + self.cost.windowed
        model, head = rollout.model, rollout.model.vocab_size * rollout.model.hidden_size
        shared, routed = layers_elements(model, range(model.num_layers))
        in_layers = 1 if rollout.holds_fp8 else self.width
        self.shared_bytes = (shared * in_layers + head * self.width) / rollout.tp
        self.expert_bytes = routed * in_layers / rollout.tp
        self.experts_flops = expert_flops(model) * sum(map(model.has_experts, range(model.num_layers)))
        self.kv_bytes = bytes_per_token(model, rollout.tp, self.width)
        self.state_bytes = bytes_per_sequence(model, rollout.tp, self.width)
        launched = on_cpu or rollout.config.name == "embedded"
        self.floor_s = model.num_layers * hardware.latency.layer_us * 1e-6 if launched else 0.0

    def prefill_s(self, tokens: float, squares: float) -> float:
        """Return the seconds of prefill; only the last token of a prompt needs logits."""
        head = 2.0 * self.model.vocab_size * self.model.hidden_size
        experts = self.experts_flops * tokens
        attention = self.attention * squares + self.cost.recurrent * tokens
        flops = FlopCount((self.cost.linear - head) * tokens - experts, experts, attention)
        seconds = flops.times(1 / self.tp).seconds(self.hardware, self.dtype)
        hidden = tokens * self.model.hidden_size * self.width
        return seconds + 2 * self.model.num_layers * self.group.reduce_s(hidden, self.hardware)

    def step(self, running: int) -> TimeBreakdown:
        """Return the time of a decode step with ``running`` sequences, without attention to the KV cache."""
        states = 2 * running * self.state_bytes  # read and written
        weights = self.shared_bytes + self.expert_bytes * self._expert_share(running)
        reading = self.hardware.reading_s(weights + states)
        experts = self.experts_flops * running
        flops = FlopCount(self.cost.linear * running - experts, experts)
        computing = flops.times(1 / self.tp).seconds(self.hardware, self.dtype)
        communication = 2 * self.model.num_layers * self.reduce_s(running * self.model.hidden_size * self.width)
        fixed = self.hardware.latency.decode_step_ms * 1e-3 + max(0.0, self.floor_s - max(reading, computing))
        return _longer(computing, reading).plus(TimeBreakdown(tensor=communication, latency=fixed))

    def context(self, tokens: float) -> TimeBreakdown:
        """Return the time of a step's attention to ``tokens`` cached tokens, summed over its sequences."""
        reading = self.hardware.reading_s(tokens * self.kv_bytes)
        # Queries of the new token with all keys and values; latent attention keeps these compressed.
        latent, heads = self.model.latent, self.model.num_attention_heads
        width = 2 * latent.kv_lora_rank + latent.rope_dim if latent else 2 * self.model.head_dim
        flops = 2.0 * len(self.model.attention_layers) * heads * width * tokens / self.tp
        return _longer(self.hardware.attention_s(flops, self.dtype), reading)

    def _expert_share(self, running: int) -> float:
        """Return the share of a layer's experts that a step reads, with random routing."""
        experts = self.model.experts
        return 0.0 if experts is None else 1.0 - (1.0 - experts.per_token / experts.count) ** running

    def reduce_s(self, nbytes: float) -> float:
        """Return the seconds of a step's all-reduce."""
        if self.tp == 1:
            return 0.0
        # A small all-reduce takes one all-to-all exchange, not the two rounds of a ring.
        return self.group.reduce_s(nbytes, self.hardware) - self.hardware.latency_s(within_node=self.group.within_node)


def _longer(computing: float, reading: float) -> TimeBreakdown:
    """Return the longer of computing and reading, which overlap."""
    return TimeBreakdown(compute=computing) if computing > reading else TimeBreakdown(memory=reading)


def time_generation(rollout: PlannedRollout, timer: EngineTimer, lengths: Lengths, kv_tokens: float) -> GenerationTime:
    """Simulate the queue of a replica.

    Args:
        rollout: number of samples, replicas and slots.
        timer: times prefill and decode steps.
        lengths: prompt and response lengths.
        kv_tokens: tokens in the KV cache of a replica.
    """
    count = max(1, -(-rollout.samples // rollout.replicas))
    prompts, responses = lengths.rows(count)
    shared = rollout.samples_per_prompt if rollout.config.name == "sglang" else 1
    queue = _Queue(prompts, responses, rollout.config.max_num_seqs, kv_tokens, shared)
    prefill, decode, steps, running = queue.play(timer)
    p, r = prompts.astype(float), responses.astype(float)
    # prefill computes a shared prompt once; a response token attends to the prompt and to all previous tokens
    tokens, pairs = (
        float(p.sum()) / shared + float(r.sum()),
        float((p**2).sum()) / shared + float((r * (2 * p + r)).sum()),
    )
    flops = (timer.cost.linear * tokens + timer.attention * pairs) * rollout.samples / count
    cost = TimeBreakdown(compute=prefill).plus(decode)
    return GenerationTime(prefill, decode.seconds, steps, running, PassTime("gen", "rollout", cost, FlopCount(flops)))


class _Queue:
    """The request queue of a replica.

    Args:
        prompts: prompt lengths.
        responses: response lengths.
        slots: maximum number of running sequences.
        kv_tokens: maximum tokens over all running sequences.
        shared: number of consecutive samples per prompt, which is computed once.
    """

    def __init__(self, prompts: Ints, responses: Ints, slots: int, kv_tokens: float, shared: int) -> None:
        self.prompts, self.responses = prompts.tolist(), responses.tolist()
        self.slots, self.kv_tokens, self.shared = slots, kv_tokens, shared
        self.waiting = deque(range(len(prompts)))
        self.running: list[tuple[int, int]] = []  # last step and index of each running sequence
        self.reserved = 0  # tokens of running sequences at their full length

    def play(self, timer: EngineTimer) -> tuple[float, TimeBreakdown, int, float]:
        """Run the queue until it is empty; return prefill seconds, decode time, steps and sequences per step."""
        step, context, prefill, decode, occupied = 0, 0, 0.0, TimeBreakdown(), 0
        while self.waiting or self.running:
            admitted = self._admit(step)
            context += sum(self.prompts[i] for i in admitted)
            new = [self.prompts[i] for i in admitted if i % self.shared == 0]
            prefill += timer.prefill_s(sum(new), sum(length**2 for length in new)) if new else 0.0
            count, steps = len(self.running), self.running[0][0] - step
            # The context grows by one token per sequence and step; the mean over these steps is used.
            per_step = timer.step(count).plus(timer.context(context + count * steps / 2))
            decode, occupied = decode.plus(per_step.times(steps)), occupied + steps * count
            step, context = step + steps, context + count * steps
            context -= self._release(step)
        return prefill, decode, step, occupied / max(1, step)

    def _admit(self, step: int) -> list[int]:
        """Start waiting sequences while a slot is free and the KV cache has room; at least one always runs."""
        admitted = []
        while self.waiting and len(self.running) < self.slots:
            i = self.waiting[0]
            tokens = self.prompts[i] + self.responses[i]
            if self.running and self.reserved + tokens > self.kv_tokens:
                break
            heapq.heappush(self.running, (step + self.responses[i], self.waiting.popleft()))
            self.reserved += tokens
            admitted.append(i)
        return admitted

    def _release(self, step: int) -> int:
        """End sequences that are complete at a step; return their tokens."""
        freed = 0
        while self.running and self.running[0][0] == step:
            _, i = heapq.heappop(self.running)
            freed += self.prompts[i] + self.responses[i]
        self.reserved -= freed
        return freed
