"""Which requests wait, grouped so that what they share is computed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# A prefix is computed on its own only if that saves at least this many tokens of prompts: it costs a forward pass.
MIN_TOKENS_SAVED = 64


class Group(NamedTuple):
    """Requests with the same prompt."""

    prompt: tuple[int, ...]
    members: list[int]
    """Indices of the requests, in the caller's order."""


class PromptQueue:
    """Waiting requests, in the order in which their prompts first came.

    Args:
        prompts: one per request, token ids.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        members: dict[tuple[int, ...], list[int]] = {}
        for index, prompt in enumerate(prompts):
            members.setdefault(tuple(prompt), []).append(index)
        self._waiting = deque(Group(prompt, indices) for prompt, indices in members.items())
        self.prefix_length = shared_prefix_length(list(members))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def peek(self) -> tuple[int, ...]:
        """The next prompt."""
        return self._waiting[0].prompt

    def take(self, room: int, may_split: bool) -> list[Group]:
        """Removes the next groups.

        Args:
            room: most requests to take.
            may_split: a group that does not fit may be cut, at the price of computing its prompt again later.

        Returns:
            Groups of at most ``room`` requests together; none if the next group neither fits nor may be cut.
        """
        taken: list[Group] = []
        while self._waiting and len(self._waiting[0].members) <= room:
            taken.append(self._waiting.popleft())
            room -= len(taken[-1].members)
        if not taken and self._waiting and may_split and room:
            prompt, members = self._waiting[0]
            taken.append(Group(prompt, members[:room]))
            self._waiting[0] = Group(prompt, members[room:])
        return taken


def shared_prefix_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many first tokens all prompts share and are worth computing once: a system prompt, a chat template's start.

    Every prompt keeps at least one token behind the prefix, whose output gives its first new token.
    """
    lowest, highest = min(prompts), max(prompts)
    length = 0
    for ours, theirs in zip(lowest, highest, strict=False):
        if ours != theirs:
            break
        length += 1
    length = min(length, min(len(prompt) for prompt in prompts) - 1)
    return length if length * (len(prompts) - 1) >= MIN_TOKENS_SAVED else 0


def within_budget(groups: Sequence[Group], prefix: int, max_tokens: int) -> Iterator[list[Group]]:
    """Cuts groups into runs of at most ``max_tokens`` prompt tokens behind the prefix; a longer prompt runs alone."""
    run: list[Group] = []
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
