"""Turns of a conversation, recorded for checkpoints: a resumed conversation repeats its turns without the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from megarl.agents.types import StoredTurn
from megarl.rollout.interface import Completion, SamplingParams


class GenerateTurn(Protocol):
    """Generate one turn, possibly from the tokens of an interrupted one."""

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        key: str,
        routes_from: int | None,
        prior: Completion | None,
    ) -> Completion:
        """See :meth:`megarl.rollout.router.Router.generate`."""


class TurnRecord:
    """Generates the turns of one conversation, and records them for checkpoints.

    A turn is found again by its context, so a resumed conversation repeats its stored turns without the engine, as far
    as tools answer as before.

    Args:
        turns: turns that exist already.
    """

    def __init__(self, generate: GenerateTurn, turns: Sequence[StoredTurn]) -> None:
        self._generate = generate
        self._turns = {turn.context: turn for turn in turns}
        self._not_repeated = set(self._turns)
        self._open: set[str] = set()

    @property
    def was_led_again(self) -> bool:
        """Whether the conversation took another way than its stored turns, which are lost then."""
        return bool(self._not_repeated)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, key: str, routes_from: int | None = None
    ) -> Completion:
        """See :class:`megarl.agents.types.Generate`."""
        context = context_digest(prompt_ids, seed)
        stored = self._turns.get(context)
        self._not_repeated.discard(context)
        completion = None if stored is None else stored.completion
        if completion is None or completion.finish_reason == "abort":
            self._open.add(context)
            completion = await self._generate(
                prompt_ids, params, seed=seed, key=key, routes_from=routes_from, prior=completion
            )
            if completion.finish_reason != "abort":  # by the engine itself
                self._turns[context] = StoredTurn.of(context, completion)
            self._open.discard(context)
        return completion

    def stored(self, interrupted: Mapping[str, Completion]) -> list[StoredTurn]:
        """Return the turns so far.

        Args:
            interrupted: unfinished turns of all conversations, by context.
        """
        partial = {name: StoredTurn.of(name, interrupted[name]) for name in self._open if name in interrupted}
        return list((self._turns | partial).values())


def context_digest(prompt_ids: Sequence[int], seed: int) -> str:
    """Return a digest of a turn's prompt and seed."""
    tokens = np.asarray(prompt_ids, np.int32).tobytes()
    return hashlib.blake2b(tokens + seed.to_bytes(16, "little", signed=True), digest_size=12).hexdigest()
