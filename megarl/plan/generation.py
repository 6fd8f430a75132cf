"""Seconds of generation: the queue of a replica played through, step by step of its engine.

A step of ``B`` sequences reads the weights once and the keys and values of all tokens so far and computes ``B``
tokens; it takes the longer of reading and computing, the collectives of its layers, and what the engine itself takes.
Sequences come from a queue whenever a slot is free and the cache has room; their prompts are computed at the speed of
large products. That is continuous batching as Orca (OSDI 2022) describes it. Towards the end few answers are left, and
the steps, now cheap but far from the device's peak, are paced by reading weights.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from megarl.models.sequence_cost import sequence_cost
from megarl.plan.flops import Work, expert_operations, layers_elements
from megarl.plan.groups import Group
from megarl.plan.hardware import Hardware
from megarl.plan.job import PlannedRollout
from megarl.plan.kv_room import bytes_per_token
from megarl.plan.lengths import Ints, Lengths
from megarl.plan.pass_times import Cost, PassTime


class Generated(NamedTuple):
    """What playing a replica's queue through told.

    Attributes:
        prefill_s: seconds in which prompts are computed.
        decode_s: seconds of steps.
        steps: of the engine.
        mean_running: sequences in a step, on average.
        time: the whole as a phase; its work is that of all replicas.
    """

    prefill_s: float
    decode_s: float
    steps: int
    mean_running: float
    time: PassTime


class Decoder:
    """Times an engine's work on one replica.

    Args:
        rollout: model, engine and sizes.
        hardware: what it runs on.
        devices_per_node: of the cluster.
        on_cpu: the engine launches its kernels one by one, without graphs.
    """

    def __init__(self, rollout: PlannedRollout, hardware: Hardware, devices_per_node: int, *, on_cpu: bool) -> None:
        self.model, self.tp, self.hardware = rollout.model, rollout.tp, hardware
        self.dtype, self.width = rollout.config.dtype, rollout.dtype_bytes
        self.group = Group(rollout.tp, 1, devices_per_node)
        self.cost = sequence_cost(rollout.model)
        model, head = rollout.model, rollout.model.vocab_size * rollout.model.hidden_size
        shared, routed = layers_elements(model, range(model.num_layers))
        self.shared_bytes = (shared + head) * self.width / rollout.tp
        self.expert_bytes = routed * self.width / rollout.tp
        self.experts_flops = expert_operations(model) * sum(map(model.has_experts, range(model.num_layers)))
        self.kv_bytes = bytes_per_token(model, rollout.tp, self.width)
        launched = on_cpu or rollout.config.name == "embedded"
        self.floor_s = model.num_layers * hardware.latency.layer_us * 1e-6 if launched else 0.0

    def prefill_s(self, tokens: float, squares: float) -> float:
        """Seconds in which prompts are computed; their last tokens' logits alone are taken."""
        head = 2.0 * self.model.vocab_size * self.model.hidden_size
        experts = self.experts_flops * tokens
        work = Work((self.cost.linear - head) * tokens - experts, experts, self.cost.quadratic * squares)
        seconds = work.times(1 / self.tp).seconds(self.hardware, self.dtype)
        hidden = tokens * self.model.hidden_size * self.width
        return seconds + 2 * self.model.num_layers * self.group.reduce_s(hidden, self.hardware)

    def step_s(self, running: int) -> float:
        """Seconds of a step of so many sequences, their keys and values aside."""
        reading = self.hardware.reading_s(self.shared_bytes + self.expert_bytes * self._touched(running))
        experts = self.experts_flops * running
        work = Work(self.cost.linear * running - experts, experts)
        computing = work.times(1 / self.tp).seconds(self.hardware, self.dtype)
        hidden = running * self.model.hidden_size * self.width
        talking = 2 * self.model.num_layers * self.reduce_s(hidden)
        return max(reading, computing, self.floor_s) + talking + self.hardware.latency.decode_step_ms * 1e-3

    def context_s(self, tokens: float) -> float:
        """Seconds in which a step attends to so many tokens, over all of its sequences."""
        reading = self.hardware.reading_s(tokens * self.kv_bytes)
        # All queries of a sequence's new token with its keys and values, which latent attention leaves compressed.
        latent, heads = self.model.latent, self.model.num_attention_heads
        width = 2 * latent.kv_lora_rank + latent.rope_dim if latent else 2 * self.model.head_dim
        flops = 2.0 * self.model.num_layers * heads * width * tokens / self.tp
        return max(reading, self.hardware.attention_s(flops, self.dtype))

    def _touched(self, running: int) -> float:
        """Share of a layer's experts that a step of so many sequences reads, when each chooses at random."""
        experts = self.model.experts
        return 0.0 if experts is None else 1.0 - (1.0 - experts.per_token / experts.count) ** running

    def reduce_s(self, nbytes: float) -> float:
        """Seconds of a step's all-reduce of so many bytes."""
        if self.tp == 1:
            return 0.0
        # Small ones take one exchange of everything with everybody, not a ring's two rounds.
        return self.group.reduce_s(nbytes, self.hardware) - self.hardware.latency_s(within_node=self.group.within_node)


def time_generation(rollout: PlannedRollout, decoder: Decoder, lengths: Lengths, kv_tokens: float) -> Generated:
    """Plays the queue of a replica through.

    Args:
        rollout: how many samples, replicas and slots there are.
        decoder: times the work.
        lengths: of prompts and answers.
        kv_tokens: tokens that the cache of a replica has room for.
    """
    count = max(1, -(-rollout.samples // rollout.replicas))
    prompts, responses = lengths.rows(count)
    shared = rollout.config.n if rollout.config.name == "sglang" else 1
    prefill, decode, steps, running = _play(
        prompts, responses, rollout.config.max_num_seqs, kv_tokens, decoder, lambda i: i % shared == 0
    )
    totals = (prompts + responses).astype(float)
    work = float(decoder.cost.linear * totals.sum() + decoder.cost.quadratic * (totals**2).sum())
    work *= rollout.samples / count
    talking = (
        steps * 2 * decoder.model.num_layers * decoder.reduce_s(running * decoder.model.hidden_size * decoder.width)
    )
    fixed = steps * decoder.hardware.latency.decode_step_ms * 1e-3
    cost = Cost(compute=prefill, memory=max(0.0, decode - talking - fixed), tensor=min(talking, decode), latency=fixed)
    return Generated(prefill, decode, steps, running, PassTime("gen", "rollout", cost, Work(work)))


def _play(
    prompts: Ints, responses: Ints, slots: int, room: float, decoder: Decoder, is_new: Callable[[int], bool]
) -> tuple[float, float, int, float]:
    """Seconds of prefill, seconds of steps, steps, and sequences per step."""
    queue = deque(range(len(prompts)))
    ends: list[tuple[int, int]] = []  # step in which a running sequence ends, its number
    step, held, context, prefill, decode, occupied = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    while queue or ends:
        tokens = squares = 0.0
        while queue and len(ends) < slots and (not ends or held + prompts[queue[0]] + responses[queue[0]] <= room):
            i = queue.popleft()
            heapq.heappush(ends, (step + int(responses[i]), i))
            held += prompts[i] + responses[i]
            context += prompts[i]
            if is_new(i):
                tokens, squares = tokens + prompts[i], squares + float(prompts[i]) ** 2
        if tokens:
            prefill += decoder.prefill_s(tokens, squares)
        many = len(ends)
        steps = ends[0][0] - step
        # The context grows by a token of each sequence in each step; its mean over these steps is what counts.
        decode += steps * (decoder.step_s(many) + decoder.context_s(context + many * steps / 2))
        occupied += steps * many
        step, context = step + steps, context + many * steps
        while ends and ends[0][0] == step:
            _, i = heapq.heappop(ends)
            held -= prompts[i] + responses[i]
            context -= prompts[i] + responses[i]
    return float(prefill), float(decode), step, float(occupied) / max(1, step)
