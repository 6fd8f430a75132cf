"""Sampling of tokens with per-request random streams, and stop rules that end a request.

Each running request has a lane: a row in the tables of :class:`Sampler` and :class:`StopRules`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.data.tokenizers import open_tokenizer
from megarl.rollout.interface import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text."""


def uniform_table(seeds: Sequence[int], count: int) -> np.ndarray:
    """Return uniform random numbers in [0, 1) that depend only on the seed and the position in its stream.

    SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: number j of a seed is the mixing function at
    ``mix(seed) + (j + 1) * golden``. A few vector operations compute whole tables. A generator object per request would
    cost more than the sampling itself.

    Args:
        seeds: any integers; taken modulo 2^64.

    Returns:
        float64 ``[len(seeds), count]``, multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GOLDEN)
        counter = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(start[:, None] + counter)
    table: np.ndarray = (bits >> np.uint64(11)) * 2.0**-53
    return table


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


class Draws(NamedTuple):
    """One drawn token per row.

    Attributes:
        tokens: int64 ``[rows]``.
        log_probs: float32 ``[rows]``, see :attr:`megarl.rollout.interface.Completion.log_probs`.
        support: int32 ``[rows, k]``, the tokens that each was drawn from, -1 = none; None if no request wants them.
    """

    tokens: Tensor
    log_probs: Tensor
    support: Tensor | None


class Sampler:
    """Draws the next token of each running request."""

    def __init__(self, lanes: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(lanes, dtype=dtype, device=device)

        self._greedy, self._temperature = column(torch.bool), column(torch.float32)
        self._top_p, self._top_k = column(torch.float64), column(torch.int64)
        self._min_p, self._penalty = column(torch.float32), column(torch.float32)
        self._with_support = column(torch.bool)
        self._drawn = torch.zeros(lanes, 0, dtype=torch.bool, device=device)
        self._uniforms = torch.zeros(lanes, 0, dtype=torch.float64, device=device)
        self._params: dict[int, SamplingParams] = {}
        self._drawn_before: list[tuple[int, Tensor]] = []
        self._survey()

    def assign(self, lanes: Sequence[int], params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        """Assign requests with these parameters and seeds to lanes."""
        self._params.update(zip(lanes, params, strict=True))
        self._survey()
        at = torch.tensor(lanes, device=self._greedy.device)

        def fill(column: Tensor, values: Sequence[float]) -> None:
            column[at] = torch.tensor(values, dtype=column.dtype, device=column.device)

        fill(self._greedy, [p.temperature == 0 for p in params])
        fill(self._temperature, [p.temperature or 1.0 for p in params])
        fill(self._top_p, [p.top_p for p in params])
        fill(self._top_k, [p.largest_support for p in params])
        fill(self._with_support, [p.support > 0 for p in params])
        fill(self._min_p, [p.min_p for p in params])
        fill(self._penalty, [p.repetition_penalty for p in params])
        self._drawn[at] = False
        longest = max((p.max_new_tokens for p in params if p.temperature > 0), default=0)
        if longest > self._uniforms.shape[1]:
            self._uniforms = F.pad(self._uniforms, (0, longest - self._uniforms.shape[1]))
        self._uniforms[at, :longest] = torch.from_numpy(uniform_table(seeds, longest)).to(at.device)

    def mark_drawn(self, lane: int, tokens: Tensor) -> None:
        """Count tokens ``[n]`` of a lane's response as drawn before, for the repetition penalty."""
        if self._params[lane].repetition_penalty != 1:
            self._drawn_before.append((lane, tokens))

    def release(self, lanes: Sequence[int]) -> None:
        """Free lanes."""
        for lane in lanes:
            del self._params[lane]
        self._survey()

    def _survey(self) -> None:
        """Update which steps the running requests can skip."""
        params = self._params.values()
        self._all_greedy = all(p.temperature == 0 for p in params)
        self._any_greedy = any(p.temperature == 0 for p in params)
        self._scaled = any(p.temperature not in (0, 1) for p in params)
        self._support = max((p.support for p in params), default=0)
        self._filtered = any(p.top_p < 1 or p.top_k > 0 or p.support for p in params)
        self._min_filtered = any(p.min_p > 0 for p in params)
        self._penalized = any(p.repetition_penalty != 1 for p in params)

    def draw(self, logits: Tensor, lanes: Tensor, steps: Tensor) -> Draws:
        """Draw one token per row.

        Args:
            logits: float32 ``[rows, vocab]``.
            lanes: int64 ``[rows]``, lane of each row's request.
            steps: int64 ``[rows]``, tokens that the request already has.
        """
        if self._penalized:
            logits = self._penalize(logits, lanes)
        if self._scaled:
            logits = logits / self._temperature[lanes, None]
        log_probs = logits.log_softmax(-1)
        probs = None if self._all_greedy else self._filter(log_probs.exp(), lanes)
        if probs is None:
            tokens = log_probs.argmax(-1)
        else:
            tokens = self._invert_cdf(probs, lanes, steps)
            if self._any_greedy:
                tokens = torch.where(self._greedy[lanes], log_probs.argmax(-1), tokens)
        if self._penalized:
            self._drawn[lanes, tokens] = True
        drawn = log_probs.gather(1, tokens[:, None])[:, 0]
        if not self._support:
            return Draws(tokens, drawn, None)
        outside = torch.ones_like(log_probs, dtype=torch.bool) if probs is None else probs == 0
        outside |= self._greedy[lanes, None]
        log_probs.masked_fill_(outside.scatter_(1, tokens[:, None], False), -torch.inf)
        ranked, support = log_probs.topk(min(self._support, log_probs.shape[1]))
        support = support.int().masked_fill_(ranked == -torch.inf, -1)
        drawn = torch.where(self._with_support[lanes], drawn - ranked.logsumexp(-1), drawn)
        return Draws(tokens, drawn, F.pad(support, (0, self._support - support.shape[1]), value=-1))

    def _penalize(self, logits: Tensor, lanes: Tensor) -> Tensor:
        """Lower the logits of tokens that the requests have drawn; a request with penalty 1 keeps its logits."""
        if not self._drawn.shape[1]:  # the table exists once a request needs it
            self._drawn = torch.zeros(len(self._drawn), logits.shape[1], dtype=torch.bool, device=logits.device)
        for lane, tokens in self._drawn_before:
            self._drawn[lane, tokens] = True
        self._drawn_before = []
        penalty = self._penalty[lanes, None]
        return torch.where(self._drawn[lanes], torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _filter(self, probs: Tensor, lanes: Tensor) -> Tensor:
        """Set to zero the probabilities that the rows' requests exclude."""
        if self._filtered:
            probs = filter_top_k_top_p(probs, self._top_k[lanes], self._top_p[lanes])
        if self._min_filtered:
            probs = probs.masked_fill(probs < self._min_p[lanes, None] * probs.amax(-1, keepdim=True), 0)
        return probs

    def _invert_cdf(self, probs: Tensor, lanes: Tensor, steps: Tensor) -> Tensor:
        """Return the token at the row's random number in the cumulative distribution over token ids."""
        cumulated = probs.cumsum(-1, dtype=torch.float64)
        # At most 1 - 2^-53, so the product is below the total after rounding: the chosen token has probability > 0.
        target = self._uniforms[lanes, steps][:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, target, right=True)[:, 0]
        # Out of range only if the model returned NaN, which the engine reports at the end of the batch.
        return tokens.clamp_(max=probs.shape[1] - 1)


def filter_top_k_top_p(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to zero the probabilities excluded by top-k, then by top-p of the rest; the most likely token always stays.

    Args:
        probs: ``[rows, vocab]``, sums of 1.
        top_k: int64 ``[rows]``, tokens to keep; ties are ranked by id.
        top_p: ``[rows]``, keeps the tokens with less than this cumulative probability before them.

    Returns:
        A new tensor like ``probs``, not renormalized.
    """
    ranked, order = probs.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    ranked = ranked.masked_fill(ranks >= top_k[:, None], 0)
    cumulated = ranked.cumsum(-1, dtype=torch.float64)
    excluded = (cumulated - ranked) >= top_p[:, None] * cumulated[:, -1:]
    excluded[:, 0] = False
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill(excluded, 0))


class StopRules:
    """Decides when each running request has ended: at a stop token, at a stop string, or at its limit.

    Args:
        eos: tokens that end every request without ``ignore_eos``.
        decode: decodes tokens to text; None: no request has stop strings.
    """

    def __init__(
        self, lanes: int, eos: frozenset[int], vocab_size: int, decode: Decode | None, device: torch.device
    ) -> None:
        self._eos, self._decode, self._device = eos, decode, device
        self._stop_rows: dict[frozenset[int], int] = {}
        self._stops = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._set = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._limits = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._texts: dict[int, tuple[str, ...]] = {}

    def assign(self, lanes: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Assign requests with these parameters to lanes."""
        ids = [frozenset() if p.ignore_eos else self._eos.union(p.stop_token_ids) for p in params]
        new = [stops for stops in dict.fromkeys(ids) if stops not in self._stop_rows]
        if new:
            rows = torch.zeros(len(new), self._stops.shape[1], dtype=torch.bool)
            for row, stops in zip(rows, new, strict=True):
                row[list(stops)] = True
                self._stop_rows[stops] = len(self._stop_rows)
            self._stops = torch.cat([self._stops, rows.to(self._device)])
        at = torch.tensor(lanes, device=self._device)
        self._set[at] = torch.tensor([self._stop_rows[stops] for stops in ids], device=self._device)
        self._limits[at] = torch.tensor([p.max_new_tokens for p in params], device=self._device)
        for lane, p in zip(lanes, params, strict=True):
            self._texts.pop(lane, None)
            if p.stop:
                self._texts[lane] = p.stop

    def apply(self, lanes: Tensor, responses: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each row's request has ended, and whether it ended by a stop rule instead of its limit.

        Args:
            lanes: ``[rows]``, lane of each row's request.
            responses: ``[all lanes, longest]``, generated tokens.
            counts: ``[rows]``, tokens of each row's request.
        """
        stopped = self._stops[self._set[lanes], responses[lanes, counts - 1]]
        if self._texts:
            stopped |= self._at_stop_string(lanes, responses, counts)
        return stopped | (counts >= self._limits[lanes]), stopped

    def _at_stop_string(self, lanes: Tensor, responses: Tensor, counts: Tensor) -> Tensor:
        assert self._decode is not None
        matches = torch.zeros(len(lanes), dtype=torch.bool)
        for row, (lane, count) in enumerate(zip(lanes.tolist(), counts.tolist(), strict=True)):
            texts = self._texts.get(lane)
            if texts:
                # A string of n characters has at most 4 n bytes, and a token has at least one byte.
                tail = 4 * max(map(len, texts)) + 1
                text = self._decode(responses[lane, max(0, count - tail) : count].tolist())
                matches[row] = any(stop in text for stop in texts)
        return matches.to(self._device)


def load_decode(folder: str) -> Decode:
    """Return a decode function with the tokenizer of a model folder, loaded at the first call.

    Raises:
        ModelError: at that call, if no tokenizer can be loaded from the folder.
    """

    @functools.cache
    def load() -> Decode:
        return functools.partial(
            open_tokenizer(folder).decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    return lambda ids: load()(ids)
