"""Continuous batching: requests come at any time, run together step by step, and leave when they end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.rollout.embedded.attention import PromptAttention, StepAttention
from megarl.rollout.embedded.decoder import Decoder
from megarl.rollout.embedded.kv_cache import KVCache
from megarl.rollout.embedded.queue import Group, PromptQueue, within_budget
from megarl.rollout.embedded.sampling import Sampler
from megarl.rollout.embedded.stopping import StopRules
from megarl.rollout.interface import Request

# Slots are refilled once this share of them is free: a prompt pass for one or two sequences costs as much as for many.
REFILL_SHARE = 1 / 8


class Ended(NamedTuple):
    """A request that has ended with these tokens."""

    request: Request
    token_ids: list[int]
    log_probs: list[float]
    stopped: bool
    """At a stop token or string, else at its limit."""


class Generation:
    """The requests that an engine has under way.

    Running sequences occupy slots ``0 .. size - 1`` of the cache without gaps: the last ones move into the slots of
    those that end, so every step computes live sequences only, and attends no further than the longest of them. What
    is known of a request lies in its lane, a row of tables, which it keeps while it runs.

    Args:
        decoder: the model.
        cache: no slot is in use; its length must suffice for every prompt with its answer.
        sampler: draws tokens.
        rules: when a request ends.
        lanes: most requests that run at a time, of sampler and rules, too.
        prompt_tokens: most prompt tokens to compute in one forward pass.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, sampler: Sampler, rules: StopRules, lanes: int, prompt_tokens: int
    ) -> None:
        self.decoder, self._cache, self._sampler, self._rules = decoder, cache, sampler, rules
        self._prompt_tokens = prompt_tokens
        self._queue: PromptQueue[Request] = PromptQueue()
        self._prefix: list[Tensor] | None = None
        self._device = device = cache.device
        self._size = 0
        # By slot: newest token, the position it will be stored at, tokens generated, lane.
        self._state = torch.zeros(4, lanes, dtype=torch.int64, device=device)
        self._lanes: dict[int, Request] = {}
        self._free_lanes = list(range(lanes))
        self._tokens = torch.zeros(lanes, 0, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(lanes, 0, dtype=torch.float32, device=device)
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        """Requests under way, running and waiting."""
        return len(self._queue) + len(self._lanes)

    def add(self, requests: Sequence[Request]) -> None:
        """Puts requests behind those that wait."""
        self._queue.add([(request.prompt_ids, request) for request in requests])
        self._prefix = None

    def advance(self) -> list[Ended]:
        """Fills free slots from the queue, then computes one token of every running sequence; returns what ended."""
        free = self._cache.slots - self._size
        if self._queue and (free >= max(1, int(self._cache.slots * REFILL_SHARE)) or not self._size):
            self._refill(free)
        if self._size:
            self._step()
        ended, self._ended = self._ended, []
        return ended

    def drop(self, request_ids: Collection[str]) -> list[Ended]:
        """Gives up requests; returns what they have."""
        waiting = self._queue.remove(lambda request: request.request_id in request_ids)
        dropped = [Ended(request, [], [], False) for request in waiting]
        lanes = [lane for lane, request in self._lanes.items() if request.request_id in request_ids]
        if lanes:
            running = self._state[3, : self._size]
            gone = torch.isin(running, torch.tensor(lanes, device=self._device))
            self._leave(0, gone, torch.zeros_like(gone))
            dropped += self._ended
            self._ended = []
        return dropped

    def _refill(self, free: int) -> None:
        groups = self._queue.take(free, may_split=not self._size)
        if groups and self._prefix is None:
            self._prefix = self._compute_prefix(groups)
        for run in within_budget(groups, self._queue.prefix_length, self._prompt_tokens):
            self._start(run, self._prefix or [])

    def _compute_prefix(self, groups: Sequence[Group[Request]]) -> list[Tensor]:
        """Keys and values of the tokens that all waiting prompts begin with, computed in a free slot."""
        length = self._queue.prefix_length
        if not length:
            return []
        self._cache.fit(max(length, self._cache.width if self._size else 0), self._size)
        attention = PromptAttention(self._cache, self._size, [length], 0)
        tokens = torch.tensor(groups[0].prompt[:length], device=self._device)
        self.decoder.hidden(tokens, attention.positions, attention, wanted=attention.ends[:0])
        return self._cache.snapshot(self._size, length)

    def _start(self, groups: Sequence[Group[Request]], prefix: list[Tensor]) -> None:
        """Computes prompts, each once, and draws the first token of every request of theirs."""
        first, skip = self._size, self._queue.prefix_length
        longest = max(len(group.prompt) for group in groups)
        self._cache.fit(max(longest, self._cache.width if first else 0), first)
        if skip:
            self._cache.restore(prefix, first, len(groups))
        attention = PromptAttention(self._cache, first, [len(group.prompt) - skip for group in groups], skip)
        tokens = torch.tensor([token for group in groups for token in group.prompt[skip:]], device=self._device)
        logits = self.decoder.logits(self.decoder.hidden(tokens, attention.positions, attention, attention.ends))

        # The first member of each group sits where its prompt was computed; the others get copies behind them all.
        owners = [*range(len(groups)), *(i for i, group in enumerate(groups) for _ in group.members[1:])]
        members = [group.members[0] for group in groups] + [m for group in groups for m in group.members[1:]]
        owner = torch.tensor(owners, device=self._device)
        if len(owners) > len(groups):
            copies = torch.arange(len(groups), len(owners), device=self._device)
            self._cache.copy(first + owner[len(groups) :], first + copies, longest)

        self._size = first + len(owners)
        state = self._state[:, first : self._size]
        state[1] = attention.positions[attention.ends][owner] + 1
        state[2] = 0
        state[3] = torch.tensor(self._assign(members), device=self._device)
        self._record(first, *self._sampler.draw(logits[owner], state[3], state[2]))

    def _assign(self, requests: Sequence[Request]) -> list[int]:
        """A lane for each request."""
        lanes = [self._free_lanes.pop() for _ in requests]
        self._lanes.update(zip(lanes, requests, strict=True))
        params = [request.params for request in requests]
        self._sampler.assign(lanes, params, [request.seed for request in requests])
        self._rules.assign(lanes, params)
        wider = max(p.max_new_tokens for p in params) - self._tokens.shape[1]
        if wider > 0:
            self._tokens, self._log_probs = F.pad(self._tokens, (0, wider)), F.pad(self._log_probs, (0, wider))
        return lanes

    def _step(self) -> None:
        """One more token for every running sequence."""
        tokens, positions, counts, lanes = self._state[:, : self._size]
        self._cache.fit(int(positions.max()) + 1, self._size)
        attention = StepAttention(self._cache, positions)
        logits = self.decoder.logits(self.decoder.hidden(tokens, positions, attention))
        positions += 1
        self._record(0, *self._sampler.draw(logits, lanes, counts))

    def _record(self, first: int, drawn: Tensor, log_probs: Tensor) -> None:
        """Keeps the newest tokens of slots ``first .. size - 1``, and lets go of the sequences that they end."""
        tokens, _, counts, lanes = self._state[:, first : self._size]
        self._tokens[lanes, counts] = drawn
        self._log_probs[lanes, counts] = log_probs
        tokens.copy_(drawn)
        counts += 1
        ended, stopped = self._rules.apply(lanes, self._tokens, counts)
        self._leave(first, ended, stopped)

    def _leave(self, first: int, gone: Tensor, stopped: Tensor) -> None:
        """Takes sequences out of slots ``first`` and following where ``gone``, and keeps what they have."""
        rows = gone.nonzero()[:, 0]
        if not len(rows):
            return
        counts, lanes = self._state[2:, first : self._size][:, rows].tolist()
        for lane, count, at_stop in zip(lanes, counts, stopped[rows].tolist(), strict=True):
            tokens, log_probs = self._tokens[lane, :count].tolist(), self._log_probs[lane, :count].tolist()
            self._ended.append(Ended(self._lanes.pop(lane), tokens, log_probs, at_stop))
        self._sampler.release(lanes)
        self._free_lanes += lanes
        self._close_gaps(first, gone)

    def _close_gaps(self, first: int, ended: Tensor) -> None:
        """Moves the last running sequences into the slots of ended ones; ``ended`` begins at slot ``first``."""
        running = first + int((~ended).sum())
        gaps = ended[: running - first].nonzero()[:, 0] + first
        if len(gaps):
            movers = (~ended[running - first :]).nonzero()[:, 0] + running
            self._state[:, gaps] = self._state[:, movers]
            self._cache.copy(movers, gaps, int(self._state[1, gaps].max()))
        self._size = running
