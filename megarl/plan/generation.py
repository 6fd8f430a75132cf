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

    def step(self, running: int) -> Cost:
        """A step of so many sequences, their keys and values aside."""
        reading = self.hardware.reading_s(self.shared_bytes + self.expert_bytes * self._touched(running))
        experts = self.experts_flops * running
        work = Work(self.cost.linear * running - experts, experts)
        computing = work.times(1 / self.tp).seconds(self.hardware, self.dtype)
        talking = 2 * self.model.num_layers * self.reduce_s(running * self.model.hidden_size * self.width)
        fixed = self.hardware.latency.decode_step_ms * 1e-3 + max(0.0, self.floor_s - max(reading, computing))
        return _longer(computing, reading).plus(Cost(tensor=talking, latency=fixed))

    def context(self, tokens: float) -> Cost:
        """What a step attends to, so many tokens over all of its sequences."""
        reading = self.hardware.reading_s(tokens * self.kv_bytes)
        # All queries of a sequence's new token with its keys and values, which latent attention leaves compressed.
        latent, heads = self.model.latent, self.model.num_attention_heads
        width = 2 * latent.kv_lora_rank + latent.rope_dim if latent else 2 * self.model.head_dim
        flops = 2.0 * self.model.num_layers * heads * width * tokens / self.tp
        return _longer(self.hardware.attention_s(flops, self.dtype), reading)

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


def _longer(computing: float, reading: float) -> Cost:
    """Of two that go on at the same time the one that takes longer."""
    return Cost(compute=computing) if computing > reading else Cost(memory=reading)


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
    shared = rollout.answers if rollout.config.name == "sglang" else 1
    queue = _Queue(prompts, responses, rollout.config.max_num_seqs, kv_tokens, shared)
    prefill, decode, steps, running = queue.play(decoder)
    p, r = prompts.astype(float), responses.astype(float)
    # the prompt once for all of its samples; a token of an answer attends to the prompt and to those before it
    tokens, pairs = (
        float(p.sum()) / shared + float(r.sum()),
        float((p**2).sum()) / shared + float((r * (2 * p + r)).sum()),
    )
    work = (decoder.cost.linear * tokens + decoder.cost.quadratic * pairs) * rollout.samples / count
    cost = Cost(compute=prefill).plus(decode)
    return Generated(prefill, decode.seconds, steps, running, PassTime("gen", "rollout", cost, Work(work)))


class _Queue:
    """The queue of a replica.

    Args:
        prompts: lengths.
        responses: lengths.
        slots: sequences that run at a time.
        room: tokens of all of them together.
        shared: neighbours that have their prompt in common, which is computed once.
    """

    def __init__(self, prompts: Ints, responses: Ints, slots: int, room: float, shared: int) -> None:
        self.prompts, self.responses = prompts.tolist(), responses.tolist()
        self.slots, self.room, self.shared = slots, room, shared
        self.waiting = deque(range(len(prompts)))
        self.running: list[tuple[int, int]] = []  # step in which a sequence ends, its number
        self.held = 0  # tokens that running sequences will have

    def play(self, decoder: Decoder) -> tuple[float, Cost, int, float]:
        """Seconds of prompts, cost of steps, steps, and sequences per step."""
        step, context, prefill, decode, occupied = 0, 0, 0.0, Cost(), 0
        while self.waiting or self.running:
            admitted = self._admit(step)
            context += sum(self.prompts[i] for i in admitted)
            new = [self.prompts[i] for i in admitted if i % self.shared == 0]
            prefill += decoder.prefill_s(sum(new), sum(length**2 for length in new)) if new else 0.0
            many, steps = len(self.running), self.running[0][0] - step
            # The context grows by a token of each sequence in each step; its mean over these steps is what counts.
            each = decoder.step(many).plus(decoder.context(context + many * steps / 2))
            decode, occupied = decode.plus(each.times(steps)), occupied + steps * many
            step, context = step + steps, context + many * steps
            context -= self._release(step)
        return prefill, decode, step, occupied / max(1, step)

    def _admit(self, step: int) -> list[int]:
        """Those that begin now: while a slot is free and the cache has room; one always runs."""
        admitted = []
        while self.waiting and len(self.running) < self.slots:
            i = self.waiting[0]
            tokens = self.prompts[i] + self.responses[i]
            if self.running and self.held + tokens > self.room:
                break
            heapq.heappush(self.running, (step + self.responses[i], self.waiting.popleft()))
            self.held += tokens
            admitted.append(i)
        return admitted

    def _release(self, step: int) -> int:
        """Tokens of those that end now."""
        freed = 0
        while self.running and self.running[0][0] == step:
            _, i = heapq.heappop(self.running)
            freed += self.prompts[i] + self.responses[i]
        self.held -= freed
        return freed
