"""Continuous batching: one call of ``generate``, from a queue of requests to their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.rollout.embedded.attention import PromptAttention, StepAttention
from megarl.rollout.embedded.decoder import Decoder
from megarl.rollout.embedded.kv_cache import KVCache
from megarl.rollout.embedded.queue import Group, PromptQueue, within_budget
from megarl.rollout.embedded.sampling import Sampler
from megarl.rollout.interface import Request

# Slots are refilled once this share of them is free: a prompt pass for one or two sequences costs as much as for many.
REFILL_SHARE = 1 / 8


class Answers(NamedTuple):
    """What was generated, one row per request; entries at and behind ``lengths`` mean nothing."""

    tokens: Tensor
    """int64 ``[requests, longest]``"""
    log_probs: Tensor
    """float32 ``[requests, longest]``"""
    lengths: Tensor
    """int64 ``[requests]``"""
    stopped: Tensor
    """bool ``[requests]``: at a stop token, else at the limit"""


class StopRules:
    """When a request ends.

    Args:
        stop_ids: for each request the tokens that end it.
        limits: for each request the most tokens to generate.
        vocab_size: number of token ids.
        device: where the tokens will be.
    """

    def __init__(
        self, stop_ids: Sequence[frozenset[int]], limits: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        distinct = {ids: number for number, ids in enumerate(dict.fromkeys(stop_ids))}
        table = torch.zeros(len(distinct), vocab_size, dtype=torch.bool)
        for ids, number in distinct.items():
            table[number, list(ids)] = True
        self._stops = table.to(device)
        self._set = torch.tensor([distinct[ids] for ids in stop_ids], device=device)
        self._limits = torch.tensor(limits, device=device)

    def apply(self, requests: Tensor, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each row's request has ended, and whether at a stop token.

        Args:
            requests: ``[rows]``, which request a row belongs to.
            tokens: ``[rows]``, its newest token.
            counts: ``[rows]``, tokens it has, the newest included.
        """
        stopped = self._stops[self._set[requests], tokens]
        return stopped | (counts >= self._limits[requests]), stopped


class Generation:
    """One call's running sequences.

    They occupy slots ``0 .. size - 1`` of the cache without gaps: the last ones move into the slots of those that end,
    so every step computes live sequences only, and attends no further than the longest of them.

    Args:
        requests: what to generate.
        decoder: the model.
        cache: its slots are all free; holds every prompt with its answer.
        sampler: knows the requests by index.
        rules: likewise.
        prompt_tokens: most prompt tokens to compute in one forward pass.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        rules: StopRules,
        prompt_tokens: int,
    ) -> None:
        self._decoder, self._cache, self._sampler, self._rules = decoder, cache, sampler, rules
        self._prompt_tokens = prompt_tokens
        self._queue = PromptQueue([request.prompt_ids for request in requests])
        self._device = device = cache.device
        longest = max(request.params.max_new_tokens for request in requests)
        self._answers = Answers(
            torch.zeros(len(requests), longest, dtype=torch.int64, device=device),
            torch.zeros(len(requests), longest, dtype=torch.float32, device=device),
            torch.zeros(len(requests), dtype=torch.int64, device=device),
            torch.zeros(len(requests), dtype=torch.bool, device=device),
        )
        self._size = 0
        # By slot: newest token, the position it will be stored at, tokens generated, index of the request.
        self._state = torch.zeros(4, cache.slots, dtype=torch.int64, device=device)

    def run(self) -> Answers:
        """Generates everything."""
        refill_at = max(1, int(self._cache.slots * REFILL_SHARE))
        prefix = self._compute_prefix()
        while self._queue or self._size:
            free = self._cache.slots - self._size
            if self._queue and (free >= refill_at or not self._size):
                groups = self._queue.take(free, may_split=not self._size)
                for run in within_budget(groups, self._queue.prefix_length, self._prompt_tokens):
                    self._start(run, prefix)
            if self._size:
                self._step()
        longest = int(self._answers.lengths.max())
        tokens, log_probs, lengths, stopped = self._answers
        return Answers(tokens[:, :longest], log_probs[:, :longest], lengths, stopped)

    def _compute_prefix(self) -> list[Tensor]:
        """Keys and values of the tokens that all prompts begin with."""
        length = self._queue.prefix_length
        if not length:
            return []
        self._cache.fit(length, 0)
        attention = PromptAttention(self._cache, 0, [length], 0)
        tokens = torch.tensor(self._queue.peek()[:length], device=self._device)
        self._decoder.hidden(tokens, attention.positions, attention, wanted=attention.ends[:0])
        return self._cache.snapshot(0, length)

    def _start(self, groups: Sequence[Group], prefix: list[Tensor]) -> None:
        """Computes prompts, each once, and draws the first token of every request of theirs."""
        first, skip = self._size, self._queue.prefix_length
        longest = max(len(group.prompt) for group in groups)
        self._cache.fit(max(longest, self._cache.width), first)
        if skip:
            self._cache.restore(prefix, first, len(groups))
        attention = PromptAttention(self._cache, first, [len(group.prompt) - skip for group in groups], skip)
        tokens = torch.tensor([token for group in groups for token in group.prompt[skip:]], device=self._device)
        logits = self._decoder.logits(self._decoder.hidden(tokens, attention.positions, attention, attention.ends))

        # The first member of each group sits where its prompt was computed; the others get copies behind them all.
        owners = [*range(len(groups)), *(i for i, group in enumerate(groups) for _ in group.members[1:])]
        members = [group.members[0] for group in groups] + [m for group in groups for m in group.members[1:]]
        owner, request = torch.tensor([owners, members], device=self._device)
        if len(owners) > len(groups):
            copies = torch.arange(len(groups), len(owners), device=self._device)
            self._cache.copy(first + owner[len(groups) :], first + copies, longest)

        self._size = first + len(owners)
        state = self._state[:, first : self._size]
        state[1] = attention.positions[attention.ends][owner] + 1
        state[2] = 0
        state[3] = request
        self._record(first, *self._sampler.draw(logits[owner], request, state[2]))

    def _step(self) -> None:
        """One more token for every running sequence."""
        tokens, positions, counts, requests = self._state[:, : self._size]
        self._cache.fit(int(positions.max()) + 1, self._size)
        attention = StepAttention(self._cache, positions)
        logits = self._decoder.logits(self._decoder.hidden(tokens, positions, attention))
        positions += 1
        self._record(0, *self._sampler.draw(logits, requests, counts))

    def _record(self, first: int, drawn: Tensor, log_probs: Tensor) -> None:
        """Keeps the newest tokens of slots ``first .. size - 1``, and lets go of the sequences that they end."""
        tokens, _, counts, requests = self._state[:, first : self._size]
        self._answers.tokens[requests, counts] = drawn
        self._answers.log_probs[requests, counts] = log_probs
        tokens.copy_(drawn)
        counts += 1
        ended, stopped = self._rules.apply(requests, drawn, counts)
        slots = ended.nonzero()[:, 0]
        if len(slots):
            self._answers.lengths[requests[slots]] = counts[slots]
            self._answers.stopped[requests[slots]] = stopped[slots]
            self._close_gaps(first, ended)

    def _close_gaps(self, first: int, ended: Tensor) -> None:
        """Moves the last running sequences into the slots of ended ones; ``ended`` begins at slot ``first``."""
        running = first + int((~ended).sum())
        gaps = ended[: running - first].nonzero()[:, 0] + first
        if len(gaps):
            movers = (~ended[running - first :]).nonzero()[:, 0] + running
            self._state[:, gaps] = self._state[:, movers]
            self._cache.copy(movers, gaps, int(self._state[1, gaps].max()))
        self._size = running
