"""Drawing tokens from logits, each request from its own stream of random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.rollout.interface import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_table(seeds: Sequence[int], count: int) -> np.ndarray:
    """Uniform random numbers in [0, 1) that depend on nothing but the seed and the place in the stream.

    SplitMix64 (Steele, Lea, Flood 2014) read as a counter-based generator: number j of a seed is the mixing function
    at ``mix(seed) + (j + 1) * golden``. Whole tables come from a few vector operations, where one generator object
    per request would cost more than the sampling itself.

    Args:
        seeds: any integers; taken modulo 2^64.
        count: numbers per seed.

    Returns:
        float64 ``[len(seeds), count]``, multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GOLDEN)
        counter = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(start[:, None] + counter)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Draws the next tokens of requests, each of which has a lane.

    Args:
        lanes: how many requests there can be at a time.
        device: where logits will be.
    """

    def __init__(self, lanes: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(lanes, dtype=dtype, device=device)

        self._greedy, self._temperature = column(torch.bool), column(torch.float32)
        self._top_p, self._top_k = column(torch.float64), column(torch.int64)
        self._uniforms = torch.zeros(lanes, 0, dtype=torch.float64, device=device)
        self._params: dict[int, SamplingParams] = {}
        self._survey()

    def assign(self, lanes: Sequence[int], params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        """Gives requests with these parameters and seeds the lanes."""
        self._params.update(zip(lanes, params, strict=True))
        self._survey()
        at = torch.tensor(lanes, device=self._greedy.device)

        def fill(column: Tensor, values: list) -> None:
            column[at] = torch.tensor(values, dtype=column.dtype, device=column.device)

        fill(self._greedy, [p.temperature == 0 for p in params])
        fill(self._temperature, [p.temperature or 1.0 for p in params])
        fill(self._top_p, [p.top_p for p in params])
        fill(self._top_k, [p.top_k if p.top_k > 0 else 2**31 for p in params])
        longest = max((p.max_new_tokens for p in params if p.temperature > 0), default=0)
        if longest > self._uniforms.shape[1]:
            self._uniforms = F.pad(self._uniforms, (0, longest - self._uniforms.shape[1]))
        self._uniforms[at, :longest] = torch.from_numpy(uniform_table(seeds, longest)).to(at.device)

    def release(self, lanes: Sequence[int]) -> None:
        """Frees lanes."""
        for lane in lanes:
            del self._params[lane]
        self._survey()

    def _survey(self) -> None:
        """Which work the requests at hand can do without."""
        params = self._params.values()
        self._all_greedy = all(p.temperature == 0 for p in params)
        self._any_greedy = any(p.temperature == 0 for p in params)
        self._scaled = any(p.temperature not in (0, 1) for p in params)
        self._filtered = any(p.top_p < 1 or p.top_k > 0 for p in params)

    def draw(self, logits: Tensor, lanes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row.

        Args:
            logits: float32 ``[rows, vocab]``.
            lanes: int64 ``[rows]``, that of the request a row belongs to.
            steps: int64 ``[rows]``, how many tokens the request already has.

        Returns:
            Token ids int64 ``[rows]``, and their log-probs float32 ``[rows]`` at the request's temperature (1 where it
            is greedy), before top-k and top-p.
        """
        if self._scaled:
            logits = logits / self._temperature[lanes, None]
        log_probs = logits.log_softmax(-1)
        if self._all_greedy:
            tokens = log_probs.argmax(-1)
        else:
            tokens = self._invert_cdf(log_probs.exp(), lanes, steps)
            if self._any_greedy:
                tokens = torch.where(self._greedy[lanes], log_probs.argmax(-1), tokens)
        return tokens, log_probs.gather(1, tokens[:, None])[:, 0]

    def _invert_cdf(self, probs: Tensor, lanes: Tensor, steps: Tensor) -> Tensor:
        """The token in whose stretch of the cumulated distribution (in order of id) the row's number falls."""
        if self._filtered:
            probs = keep_likely(probs, self._top_k[lanes], self._top_p[lanes])
        cumulated = probs.cumsum(-1, dtype=torch.float64)
        # At most 1 - 2^-53, so the product stays below the total after rounding: the token found has probability > 0.
        target = self._uniforms[lanes, steps][:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, target, right=True)[:, 0]
        # Out of range only where the model gave NaN, which the engine reports once the batch is done.
        return tokens.clamp_(max=probs.shape[1] - 1)


def keep_likely(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets to zero what top-k, then top-p over the rest renormalised, exclude; the most likely token always stays.

    Args:
        probs: ``[rows, vocab]``, sums of 1.
        top_k: int64 ``[rows]``, tokens to keep; equals rank by id.
        top_p: ``[rows]``, keeps the tokens before which less than this mass lies, in order of falling probability.

    Returns:
        A new tensor like ``probs``, not renormalised.
    """
    ranked, order = probs.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    ranked = ranked.masked_fill(ranks >= top_k[:, None], 0)
    cumulated = ranked.cumsum(-1, dtype=torch.float64)
    excluded = (cumulated - ranked) >= top_p[:, None] * cumulated[:, -1:]
    excluded[:, 0] = False
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill(excluded, 0))
