"""Continuous batching: requests are added at any time, run together step by step, and leave when they end.

Requests with one prompt form a group, whose prompt is computed once. A prefix shared by all waiting prompts, such as a
system prompt, is computed once too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.base.image_tokens import multimodal_positions
from megarl.models.model_config import Experts
from megarl.models.vision_tower import ImageFeatures
from megarl.rollout.embedded.decoder import TransformerDecoder
from megarl.rollout.embedded.kv_cache import KVCache, PromptAttention, StepAttention
from megarl.rollout.embedded.sampling import Draws, Sampler, StopRules
from megarl.rollout.interface import Request

Member = TypeVar("Member")

# A prefix is computed separately only if that saves at least this many prompt tokens: it costs a forward pass.
MIN_TOKENS_SAVED = 64

# Slots are refilled once this share of them is free: prefill of one sequence costs as much as of several.
REFILL_SHARE = 1 / 8


@dataclass
class PromptGroup(Generic[Member]):
    """Requests with one prompt, in the caller's order."""

    prompt: tuple[int, ...]
    members: list[Member]


class RequestQueue(Generic[Member]):
    """Waiting requests, grouped by prompt, in arrival order of the prompts.

    Attributes:
        prefix_length: number of first tokens shared by all prompts since the queue was last empty.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, ...], PromptGroup[Member]] = {}
        self.prefix_length = 0

    def __len__(self) -> int:
        return sum(len(group.members) for group in self._waiting.values())

    def add(self, requests: Iterable[tuple[Sequence[int], Member]]) -> None:
        """Add requests with their prompts at the end, or to the group of their prompt."""
        for prompt, member in requests:
            ids = tuple(prompt)
            self._waiting.setdefault(ids, PromptGroup(ids, [])).members.append(member)
        self.prefix_length = shared_prefix_length(list(self._waiting))

    def remove(self, is_removed: Callable[[Member], bool]) -> list[Member]:
        """Remove and return the requests selected by ``is_removed``."""
        removed = [member for group in self._waiting.values() for member in group.members if is_removed(member)]
        for group in list(self._waiting.values()):
            group.members = [member for member in group.members if not is_removed(member)]
            if not group.members:
                del self._waiting[group.prompt]
        return removed

    def take(self, room: int, may_split: bool) -> list[PromptGroup[Member]]:
        """Remove and return the next groups.

        Args:
            may_split: whether to split a group that does not fit; its prompt is then computed again later.

        Returns:
            Groups of at most ``room`` requests in total; none if the next group does not fit and may not be split.
        """
        taken: list[PromptGroup[Member]] = []
        for group in list(self._waiting.values()):
            if len(group.members) > room:
                break
            taken.append(self._waiting.pop(group.prompt))
            room -= len(group.members)
        if not taken and self._waiting and may_split and room:
            group = next(iter(self._waiting.values()))
            taken.append(PromptGroup(group.prompt, group.members[:room]))
            group.members = group.members[room:]
        return taken


def shared_prefix_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the length of all prompts' common prefix; 0 if it is not worth computing.

    Every prompt keeps at least one token after the prefix, whose output gives its first new token.
    """
    if not prompts:
        return 0
    lowest, highest = min(prompts), max(prompts)
    length = 0
    for first, second in zip(lowest, highest, strict=False):
        if first != second:
            break
        length += 1
    length = min(length, min(len(prompt) for prompt in prompts) - 1)
    return length if length * (len(prompts) - 1) >= MIN_TOKENS_SAVED else 0


def within_budget(
    groups: Sequence[PromptGroup[Member]], prefix: int, max_tokens: int
) -> Iterator[list[PromptGroup[Member]]]:
    """Split groups into runs of at most ``max_tokens`` prompt tokens after the prefix; a longer prompt runs alone."""
    run: list[PromptGroup[Member]] = []
    tokens = 0
    for group in groups:
        length = len(group.prompt) - prefix
        if run and tokens + length > max_tokens:
            yield run
            run, tokens = [], 0
        run.append(group)
        tokens += length
    if run:
        yield run


class FinishedRequest(NamedTuple):
    """A finished or aborted request with its new tokens, those after ``request.prior``."""

    request: Request
    token_ids: list[int]
    log_probs: list[float]
    stopped: bool
    """Whether it ended at a stop token or string, not at its limit."""
    routes: np.ndarray | None = None
    """See :attr:`megarl.rollout.interface.Completion.routes`; from ``request.remaining_routes_from`` on."""
    support: np.ndarray | None = None
    """See :attr:`megarl.rollout.interface.Completion.support`; of the new tokens."""


class RouteTable:
    """Records each token's experts, by the request's lane and the position."""

    def __init__(self, experts: Experts, lanes: int, device: torch.device) -> None:
        self._shape, self._device = (sum(experts.layers), experts.per_token), device
        self._table = torch.zeros(lanes, 0, *self._shape, dtype=torch.int16, device=device)

    def new(self, count: int) -> Tensor:
        """Allocate routes ``[count, expert layers, per token]`` for the decoder to fill in."""
        return torch.empty(count, *self._shape, dtype=torch.int16, device=self._device)

    def begin(self, lane: int, parts: Sequence[Tensor]) -> None:
        """Store the routes of a lane's prompt, in parts."""
        routes = torch.cat(list(parts))
        self._widen(len(routes))
        self._table[lane, : len(routes)] = routes

    def store(self, lanes: Tensor, positions: Tensor, routes: Tensor, width: int) -> None:
        """Store ``routes [tokens, expert layers, per token]`` of one token per lane, at positions below ``width``."""
        self._widen(width)
        self._table[lanes, positions] = routes

    def read(self, lane: int, first: int, stop: int) -> np.ndarray:
        """Return the routes of a lane's positions ``first .. stop - 1``."""
        routes: np.ndarray = self._table[lane, first:stop].cpu().numpy().copy()
        return routes

    def _widen(self, width: int) -> None:
        """Make room for at least ``width`` positions, doubling the table so that this is rare."""
        if width > self._table.shape[1]:
            self._table = F.pad(
                self._table, (0, 0, 0, 0, 0, max(width, 2 * self._table.shape[1]) - self._table.shape[1])
            )


class PromptInputs(NamedTuple):
    """Inputs of :meth:`TransformerDecoder.hidden` for prompts, or equal parts of them."""

    tokens: Tensor
    positions: Tensor
    image_rows: tuple[Tensor, Tensor] | None


class ContinuousBatcher:
    """The waiting and running requests of an engine.

    Running sequences use the cache slots ``0 .. size - 1`` without gaps: the last ones move into the slots of finished
    ones. So every step computes running sequences only, and attends no further than the longest of them. Each running
    request has a lane: a row in the tables of tokens, sampling parameters and stop rules.

    Args:
        cache: empty KV cache, long enough for every prompt with its response.
        lanes: maximum running requests, also of sampler and rules.
        prompt_tokens: maximum prompt tokens in one forward pass.
        images: features of images; None for models of text only.
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        cache: KVCache,
        sampler: Sampler,
        rules: StopRules,
        lanes: int,
        prompt_tokens: int,
        routes: RouteTable | None = None,
        images: ImageFeatures | None = None,
    ) -> None:
        self.decoder, self._cache, self._sampler, self._rules = decoder, cache, sampler, rules
        self._routes, self._images = routes, images
        self._prefix_routes: Tensor | None = None
        self._prompt_tokens = prompt_tokens
        self._queue: RequestQueue[Request] = RequestQueue()
        self._prefix: list[Tensor] | None = None
        self._device = device = cache.device
        self._size = 0
        # By slot: newest token, its position in the cache, number of generated tokens, lane. Of models with images the
        # last is the position for rotary embeddings minus that in the cache.
        self._state = torch.zeros(4 + (images is not None), lanes, dtype=torch.int64, device=device)
        # On the host, since reading a position waits for the device: position of a lane = steps + its entry here.
        self._steps = 0
        self._offsets: dict[int, int] = {}
        self._lanes: dict[int, Request] = {}
        self._free_lanes = list(range(lanes))
        self._tokens = torch.zeros(lanes, 0, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(lanes, 0, dtype=torch.float32, device=device)
        self._support = torch.zeros(lanes, 0, 0, dtype=torch.int32, device=device)
        self._ended: list[FinishedRequest] = []
        self._is_sorted = False  # slots by length, longest first

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests to the end of the queue."""
        self._queue.add([((*request.prompt_ids, *request.prior_ids), request) for request in requests])
        self._prefix = None

    def advance(self) -> list[FinishedRequest]:
        """Fill free slots from the queue, then decode one token of every running sequence; return finished requests."""
        free = self._cache.slots - self._size
        if self._queue and (free >= max(1, int(self._cache.slots * REFILL_SHARE)) or not self._size):
            groups = self._queue.take(free, may_split=not self._size)
            if groups and self._prefix is None:
                self._prefix = self._compute_prefix(groups)
            for run in within_budget(groups, self._queue.prefix_length, self._prompt_tokens):
                self._start(run, self._prefix or [])
        if self._size:
            self._step()
        ended, self._ended = self._ended, []
        return ended

    def drop(self, request_ids: Collection[str]) -> list[FinishedRequest]:
        """Abort requests; return their tokens so far."""
        waiting = self._queue.remove(lambda request: request.request_id in request_ids)
        dropped = [FinishedRequest(request, [], [], False) for request in waiting]
        lanes = [lane for lane, request in self._lanes.items() if request.request_id in request_ids]
        if lanes:
            running = self._state[3, : self._size]
            gone = torch.isin(running, torch.tensor(lanes, device=self._device))
            self._leave(0, gone, torch.zeros_like(gone))
            dropped += self._ended
            self._ended = []
        return dropped

    def _compute_prefix(self, groups: Sequence[PromptGroup[Request]]) -> list[Tensor]:
        """Compute keys and values of the prefix of all waiting prompts in a free slot."""
        length = self._queue.prefix_length
        if not length:
            return []
        self._cache.fit(max(length, self._cache.width if self._size else 0), self._size)
        attention = PromptAttention(self._cache, self._size, [length], 0)
        self._prefix_routes = None if self._routes is None else self._routes.new(length)
        inputs = self._prompt_inputs(groups[:1], slice(0, length), attention.positions)
        outputs = attention.ends[:0]
        self.decoder.hidden(inputs.tokens, inputs.positions, attention, outputs, self._prefix_routes, inputs.image_rows)
        return self._cache.snapshot(self._size, length)

    def _prompt_inputs(self, groups: Sequence[PromptGroup[Request]], part: slice, positions: Tensor) -> PromptInputs:
        """Return the decoder's inputs for a part of each prompt, whose cache positions are ``positions [tokens]``."""
        ids = torch.tensor([id for group in groups for id in group.prompt[part]])
        if self._images is None:
            return PromptInputs(ids.to(self._device), positions, None)
        # Submitting has added them; other requests may have displaced them since.
        self._images.add(image for group in groups for image in group.members[0].images)
        rows = self._images.rows(ids)
        image_rows = None if rows is None else (rows[0].to(self._device), rows[1].to(self._device))
        rotary = np.concatenate([multimodal_positions(group.prompt)[:, part] for group in groups], axis=1)
        return PromptInputs(ids.to(self._device), torch.from_numpy(rotary).to(self._device), image_rows)

    def _start(self, groups: Sequence[PromptGroup[Request]], prefix: list[Tensor]) -> None:
        """Prefill prompts, each once, and draw the first token of all their requests.

        The first request of each prompt uses the prompt's slot; the others get copies of it in the slots after those.
        """
        first, prefix_length = self._size, self._queue.prefix_length
        longest = max(len(group.prompt) for group in groups)
        # 1. Prefill slots ``first, first + 1, ...``, one per prompt.
        self._cache.fit(max(longest, self._cache.width if first else 0), first)
        if prefix_length:
            self._cache.restore(prefix, first, len(groups))
        lengths = [len(group.prompt) - prefix_length for group in groups]
        attention = PromptAttention(self._cache, first, lengths, prefix_length)
        tokens, positions, image_rows = self._prompt_inputs(groups, slice(prefix_length, None), attention.positions)
        routes = None if self._routes is None else self._routes.new(len(tokens))
        hidden = self.decoder.hidden(tokens, positions, attention, attention.ends, routes, image_rows)
        logits = self.decoder.logits(hidden)
        # 2. Copy prompts to the slots of further requests; `prompts` is each request's prompt.
        requests = [group.members[0] for group in groups] + [m for group in groups for m in group.members[1:]]
        prompts = [*range(len(groups)), *(i for i, group in enumerate(groups) for _ in group.members[1:])]
        prompt_of_slot = torch.tensor(prompts, device=self._device)
        if len(requests) > len(groups):
            copies = torch.arange(len(groups), len(requests), device=self._device)
            self._cache.copy(first + prompt_of_slot[len(groups) :], first + copies, longest)
        self._size, self._is_sorted = first + len(requests), False
        # 3. Assign lanes, set the slots' states, and draw.
        lanes = self._assign(requests)
        state = self._state[:, first : self._size]
        last = attention.positions[attention.ends]
        state[1] = last[prompt_of_slot] + 1
        state[2] = torch.tensor([len(request.prior_ids) for request in requests], device=self._device)
        state[3] = torch.tensor(lanes, device=self._device)
        if self._images is not None:
            state[4] = (positions[:, attention.ends].amax(0) - last)[prompt_of_slot]
        if self._routes is not None and routes is not None:
            shared = [self._prefix_routes] if prefix_length and self._prefix_routes is not None else []
            by_prompt = routes.split(lengths)
            for lane, prompt in zip(lanes, prompts, strict=True):
                self._routes.begin(lane, [*shared, by_prompt[prompt]])
        self._record(first, self._sampler.draw(logits[prompt_of_slot], state[3], state[2]))

    def _assign(self, requests: Sequence[Request]) -> list[int]:
        """Assign a lane to each request, whose next token has the position after its prompt and prior response."""
        lanes = [self._free_lanes.pop() for _ in requests]
        self._lanes.update(zip(lanes, requests, strict=True))
        for lane, request in zip(lanes, requests, strict=True):
            self._offsets[lane] = len(request.prompt_ids) + len(request.prior_ids) - self._steps
        params = [request.params for request in requests]
        self._sampler.assign(lanes, params, [request.seed for request in requests])
        self._rules.assign(lanes, params)
        wider = max(p.max_new_tokens for p in params) - self._tokens.shape[1]
        if wider > 0:
            self._tokens, self._log_probs = F.pad(self._tokens, (0, wider)), F.pad(self._log_probs, (0, wider))
        _, length, width = self._support.shape
        wider = max(width, *(p.support for p in params)) - width
        self._support = F.pad(self._support, (0, wider, 0, self._tokens.shape[1] - length), value=-1)
        for lane, request in zip(lanes, requests, strict=True):
            if request.prior is not None:
                tokens = torch.tensor(request.prior_ids, dtype=torch.int64, device=self._device)
                self._tokens[lane, : len(tokens)] = tokens  # for stop strings
                self._sampler.mark_drawn(lane, tokens)
        return lanes

    def _step(self) -> None:
        self._cache.fit(self._longest(), self._size)
        self._sort_slots()
        tokens, positions, counts, lanes = self._state[:4, : self._size]
        routes = None if self._routes is None else self._routes.new(self._size)
        rotary = positions if self._images is None else positions + self._state[4, : self._size]
        hidden = self.decoder.hidden(tokens, rotary, StepAttention(self._cache, positions), routes=routes)
        logits = self.decoder.logits(hidden)
        if self._routes is not None and routes is not None:
            self._routes.store(lanes, positions, routes, self._longest())
        positions += 1
        self._steps += 1
        self._record(0, self._sampler.draw(logits, lanes, counts))

    def _sort_slots(self) -> None:
        """Put the longest sequences first, if decode steps read the cache in parts.

        All running sequences grow by a token per step, so the order changes only when sequences start or end.
        """
        if self._is_sorted or not self._cache.is_read_in_parts:
            return
        self._is_sorted = True
        positions = self._state[1, : self._size]
        order = positions.argsort(descending=True, stable=True)
        targets = (order != torch.arange(self._size)).nonzero()[:, 0]
        if len(targets):
            sources = order[targets]
            self._cache.copy(sources, targets, int(positions[targets].max()))
            self._state[:, targets] = self._state[:, sources]

    def _longest(self) -> int:
        """Tokens of the longest running sequence, with its newest one."""
        return max(self._offsets.values()) + self._steps + 1

    def _record(self, first: int, drawn: Draws) -> None:
        """Store the new tokens of slots ``first .. size - 1``, and remove finished sequences."""
        tokens, _, counts, lanes = self._state[:4, first : self._size]
        self._tokens[lanes, counts] = drawn.tokens
        self._log_probs[lanes, counts] = drawn.log_probs
        if drawn.support is not None:
            self._support[lanes, counts, : drawn.support.shape[1]] = drawn.support
        tokens.copy_(drawn.tokens)
        counts += 1
        ended, stopped = self._rules.apply(lanes, self._tokens, counts)
        self._leave(first, ended, stopped)

    def _leave(self, first: int, gone: Tensor, stopped: Tensor) -> None:
        """Remove sequences from slot ``first`` on if ``gone``, and keep their results."""
        rows = gone.nonzero()[:, 0]
        if not len(rows):
            return
        counts, lanes = self._state[2:4, first : self._size][:, rows].tolist()
        for lane, count, at_stop in zip(lanes, counts, stopped[rows].tolist(), strict=True):
            request = self._lanes.pop(lane)
            new = slice(len(request.prior_ids), count)
            tokens, log_probs = self._tokens[lane, new].tolist(), self._log_probs[lane, new].tolist()
            routes, first_route = None, request.remaining_routes_from
            if self._routes is not None and first_route is not None:
                routes = self._routes.read(lane, first_route, len(request.prompt_ids) + count - 1)
            support = None
            if width := request.params.support:
                support = self._support[lane, new, :width].cpu().numpy().copy()
            self._ended.append(FinishedRequest(request, tokens, log_probs, at_stop, routes, support))
            del self._offsets[lane]
        self._sampler.release(lanes)
        self._free_lanes += lanes
        self._close_gaps(first, gone)

    def _close_gaps(self, first: int, ended: Tensor) -> None:
        """Move the last running sequences into the slots of ended ones; ``ended`` begins at slot ``first``."""
        running = first + int((~ended).sum())
        gaps = ended[: running - first].nonzero()[:, 0] + first
        if len(gaps):
            movers = (~ended[running - first :]).nonzero()[:, 0] + running
            self._state[:, gaps] = self._state[:, movers]
            self._cache.copy(movers, gaps, self._longest())
            self._is_sorted = False
        self._size = running
