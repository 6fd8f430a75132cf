"""Turns of a conversation: stored ones are repeated without the engine, and recorded weight versions are awaited."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import numpy as np

from megarl.agents.types import StoredTurn, Trajectory, VersionSpan
from megarl.rollout.interface import NO_VERSION, Completion, SamplingParams


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


class VersionGate:
    """Holds conversations until the replicas have the weights of a version.

    Attributes:
        version: weight version of the replicas.
        waiting: conversations that wait for a later one.
    """

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.waiting = 0
        self._changed = asyncio.Event()

    def set_version(self, version: int) -> None:
        """Let the conversations that wait for this version go on, in the order of their waits."""
        self.version = version
        self._changed.set()
        self._changed = asyncio.Event()

    async def reached(self, version: int) -> None:
        """Wait until the replicas have this version or a later one."""
        if self.version >= version:
            return
        self.waiting += 1
        try:
            while self.version < version:
                await self._changed.wait()
        finally:
            self.waiting -= 1


class TurnRecord:
    """Generates the turns of one conversation, and records them for checkpoints.

    A turn is found again by its context, so a resumed conversation repeats its stored turns without the engine, as far
    as tools answer as before. With spans, each response stops where the recorded run interrupted it, and goes on with
    the recorded version.

    Args:
        generate: generates a turn.
        gate: of the runner.
        turns: turns that exist already.
        spans: see :class:`megarl.agents.types.PlannedSample`.
    """

    def __init__(
        self, generate: GenerateTurn, gate: VersionGate, turns: Sequence[StoredTurn], spans: Sequence[VersionSpan]
    ) -> None:
        self._generate, self._gate, self.spans = generate, gate, spans
        self._turns = {turn.context: turn for turn in turns}
        self._open: set[str] = set()
        self._tokens = 0

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, key: str, routes_from: int | None = None
    ) -> Completion:
        """See :class:`megarl.agents.types.Generate`."""
        context = context_digest(prompt_ids, seed)
        stored = self._turns.get(context)
        completion = None if stored is None else stored.completion
        self._open.add(context)
        while completion is None or completion.finish_reason == "abort":
            done = 0 if completion is None else len(completion.token_ids)
            until = await self._limit(done, params.max_new_tokens)
            limited = params if until == params.max_new_tokens else replace(params, max_new_tokens=until)
            completion = await self._generate(
                prompt_ids, limited, seed=seed, key=key, routes_from=routes_from, prior=completion
            )
            if completion.finish_reason == "abort":
                break  # by the engine itself
            if completion.finish_reason == "length" and len(completion.token_ids) < params.max_new_tokens:
                completion = replace(completion, finish_reason="abort")  # its span ends
            self._turns[context] = StoredTurn.of(context, completion)
        self._open.discard(context)
        self._tokens += len(completion.token_ids)
        return completion

    async def begin(self) -> None:
        """Wait for the version of the first token."""
        await self._limit(0, 1)

    def stored(self, interrupted: Mapping[str, Completion]) -> list[StoredTurn]:
        """Return the turns so far.

        Args:
            interrupted: unfinished turns of all conversations, by context.
        """
        partial = {name: StoredTurn.of(name, interrupted[name]) for name in self._open if name in interrupted}
        return list((self._turns | partial).values())

    async def _limit(self, done: int, most: int) -> int:
        """Wait for the version of the turn's next token; return the largest number of tokens of the turn under it.

        Args:
            done: tokens of the turn that exist.
            most: maximum number of tokens of the turn.
        """
        first, end = self._tokens + done, 0
        for version, tokens in self.spans:
            end += tokens
            if first < end:
                await self._gate.reached(version)
                return min(most, end - self._tokens)
        return most


def context_digest(prompt_ids: Sequence[int], seed: int) -> str:
    """Return a digest of a turn's prompt and seed."""
    tokens = np.asarray(prompt_ids, np.int32).tobytes()
    return hashlib.blake2b(tokens + seed.to_bytes(16, "little", signed=True), digest_size=12).hexdigest()


def version_spans(trajectory: Trajectory) -> list[VersionSpan]:
    """Return the weight versions of a trajectory's generated tokens."""
    versions = trajectory.weight_versions
    if not len(versions):
        versions = [trajectory.weight_version] * len(trajectory.response_ids)
    generated = [int(version) for version, mask in zip(versions, trajectory.generated_mask, strict=True) if mask]
    return [VersionSpan(version, len(list(run))) for version, run in groupby(generated)]
