"""When a request has ended: at a stop token, at a stop string, or at its limit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.rollout.interface import SamplingParams

Decode = Callable[[Sequence[int]], str]
"""From token ids to text."""


class StopRules:
    """Knows of each lane's request when it ends.

    Args:
        lanes: how many requests there can be at a time.
        eos: tokens that end every request, unless it ignores them.
        vocab_size: number of token ids.
        decode: makes text of tokens, for requests that have stop strings.
        device: where the tokens will be.
    """

    def __init__(self, lanes: int, eos: frozenset[int], vocab_size: int, decode: Decode, device: torch.device) -> None:
        self._eos, self._decode, self._device = eos, decode, device
        self._known: dict[frozenset[int], int] = {}
        self._stops = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._set = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._limits = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._texts: dict[int, tuple[str, ...]] = {}

    def assign(self, lanes: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Gives requests with these parameters the lanes."""
        ids = [frozenset() if p.ignore_eos else self._eos.union(p.stop_token_ids) for p in params]
        new = [stops for stops in dict.fromkeys(ids) if stops not in self._known]
        if new:
            rows = torch.zeros(len(new), self._stops.shape[1], dtype=torch.bool)
            for row, stops in zip(rows, new, strict=True):
                row[list(stops)] = True
                self._known[stops] = len(self._known)
            self._stops = torch.cat([self._stops, rows.to(self._device)])
        at = torch.tensor(lanes, device=self._device)
        self._set[at] = torch.tensor([self._known[stops] for stops in ids], device=self._device)
        self._limits[at] = torch.tensor([p.max_new_tokens for p in params], device=self._device)
        for lane, p in zip(lanes, params, strict=True):
            self._texts.pop(lane, None)
            if p.stop:
                self._texts[lane] = p.stop

    def apply(self, lanes: Tensor, answers: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each row's request has ended, and whether by its own word, not at its limit.

        Args:
            lanes: ``[rows]``, that of the request a row belongs to.
            answers: ``[all lanes, longest]``, generated tokens.
            counts: ``[rows]``, tokens that a row's request has.
        """
        stopped = self._stops[self._set[lanes], answers[lanes, counts - 1]]
        if self._texts:
            stopped |= self._at_stop_string(lanes, answers, counts)
        return stopped | (counts >= self._limits[lanes]), stopped

    def _at_stop_string(self, lanes: Tensor, answers: Tensor, counts: Tensor) -> Tensor:
        found = torch.zeros(len(lanes), dtype=torch.bool)
        for row, (lane, count) in enumerate(zip(lanes.tolist(), counts.tolist(), strict=True)):
            texts = self._texts.get(lane)
            if texts:
                # A string of n characters cannot lie in more tokens than bytes, of which four make a character at most.
                tail = 4 * max(map(len, texts)) + 1
                text = self._decode(answers[lane, max(0, count - tail) : count].tolist())
                found[row] = any(stop in text for stop in texts)
        return found.to(self._device)


def decoder_of(folder: str) -> Decode:
    """Decodes with the tokenizer of a model folder, which is loaded at the first call.

    Raises:
        OSError: at that call, if the folder has none.
    """

    @functools.cache
    def load() -> Decode:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return lambda ids: load()(ids)
