"""Records of a conversation's turns: tokens for checkpoints, and the experts of its tokens (routing replay R3).

A resumed conversation repeats its recorded turns without the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from megarl.agents.types import StoredTurn, Trajectory, narrow_ids
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
    tokens = narrow_ids(prompt_ids).tobytes()
    return hashlib.blake2b(tokens + seed.to_bytes(16, "little", signed=True), digest_size=12).hexdigest()


class GenerateWithRoutes(Protocol):
    """Generate one turn, with the experts of its tokens from a position on."""

    async def __call__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, key: str, routes_from: int | None = None
    ) -> Completion:
        """See :class:`megarl.agents.types.Generate` and :attr:`megarl.rollout.interface.Request.routes_from`."""


class RoutedSequence(NamedTuple):
    """A context with the response to it.

    Attributes:
        routes: int16 ``[routed tokens, expert layers, per token]``, the experts of its first tokens.
    """

    tokens: np.ndarray
    routes: np.ndarray

    def known(self, tokens: np.ndarray) -> int:
        """Count the first ``tokens`` whose experts are known: those of this sequence, with the same tokens before."""
        length = min(len(tokens), len(self.routes))
        different = np.flatnonzero(self.tokens[:length] != tokens[:length])
        return int(different[0]) if len(different) else length


class RouteRecord:
    """Generates the turns of one conversation, and records the experts of every token.

    The experts of a token depend on the tokens before it only. So they are known for every trajectory that begins like
    a context with its response, whatever the agent loop did with it. A token keeps the experts of the turn that
    computed it first: a later turn, maybe under other weights, requests only new tokens' experts.
    """

    def __init__(self, generate: GenerateWithRoutes) -> None:
        self._generate = generate
        self._sequences: list[RoutedSequence] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, key: str) -> Completion:
        """See :class:`megarl.agents.types.Generate`."""
        prompt = np.asarray(prompt_ids, np.int64)
        earlier, count = self._longest(prompt)
        completion = await self._generate(prompt_ids, params, seed=seed, key=key, routes_from=count)
        if completion.routes is None:
            return completion
        routes = completion.routes if earlier is None else np.concatenate([earlier.routes[:count], completion.routes])
        extended = RoutedSequence(np.concatenate([prompt, np.asarray(completion.token_ids, np.int64)]), routes)
        self._sequences = [old for old in self._sequences if old.known(extended.tokens) < len(old.routes)]
        self._sequences.append(extended)
        return completion

    def add_to(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with the experts of its tokens.

        It fails if a token before a generated one has unknown experts.
        """
        tokens = np.concatenate(
            [np.asarray(part, np.int64) for part in (trajectory.prompt_ids, trajectory.response_ids)]
        )
        sequence, count = self._longest(tokens)
        if sequence is not None:
            trajectory = replace(trajectory, routes=sequence.routes[:count])
        generated = np.flatnonzero(trajectory.response_mask)
        # The output for a token is computed at the token before it.
        needed = len(trajectory.prompt_ids) + int(generated[-1]) if len(generated) else 0
        if trajectory.error is not None or count >= needed:
            return trajectory
        return trajectory.failed(
            f"token {count} of the trajectory follows other tokens than in any request to the engine, so that its "
            "experts are unknown; actor.router_replay.mode=R3 replays those of a request that begins like it"
        )

    def _longest(self, tokens: np.ndarray) -> tuple[RoutedSequence | None, int]:
        """Sequence with the most known experts of ``tokens``, and their number."""
        best = max(self._sequences, key=lambda sequence: sequence.known(tokens), default=None)
        return best, 0 if best is None else best.known(tokens)
