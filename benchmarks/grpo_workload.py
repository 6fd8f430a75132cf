"""Workload of both sides of ``grpo_step.py``; imported by both interpreters."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

PROMPTS, SAMPLES, PROMPT_TOKENS = 64, 4, 32
PAD, EOS, FIRST_WORD, VOCAB = 0, 1, 2, 2048
LEARNING_RATE = 1e-5
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 1024,
         "tie_word_embeddings": True, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}  # fmt: skip


class Taken(NamedTuple):
    """Seconds of one step; ``cpu`` is processor time of all its processes."""

    generate: float
    update: float
    step: float
    cpu: float


@dataclass(frozen=True)
class Mix:
    """How long answers are.

    Attributes:
        name: ``equal`` or ``log-normal``.
        longest: most tokens of an answer.
        prompts: of a step.
    """

    name: str
    longest: int
    prompts: int = PROMPTS

    @property
    def rows(self) -> int:
        """Return the answers of a step."""
        return self.prompts * SAMPLES

    def lengths(self, step: int) -> list[int]:
        """Return the tokens of each response of a step, samples of a prompt together; equal in every process."""
        if self.name == "equal":
            return [self.longest] * self.rows
        rng = random.Random(step)
        return [min(self.longest, max(1, round(32 * rng.lognormvariate(0, 1)))) for _ in range(self.rows)]


MIXES = {mix.name: mix for mix in (Mix("equal", 64), Mix("log-normal", 256))}


def mix_of(name: str, tiny: bool) -> Mix:
    """Return a mix; ``tiny`` is the smallest that runs."""
    return replace(MIXES[name], longest=8, prompts=2) if tiny else MIXES[name]


def prompt_ids(step: int, count: int = PROMPTS) -> list[list[int]]:
    """Return the prompts of a step."""
    rng = random.Random(f"prompts of step {step}")
    return [[rng.randrange(FIRST_WORD, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def distinct_words(text: str) -> float:
    """Return the reward: the share of different words."""
    words = text.split()
    return len(set(words)) / max(1, len(words))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return the reward, with the arguments of a megarl reward function; reward processes import this light file."""
    return distinct_words(solution_str)


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the scope to ``seconds[name]``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - start


MARK = "peer: "
"""Prefix of the lines that the peer answers with."""
