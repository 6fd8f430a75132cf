"""Which requests wait, grouped so that what they share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member")

# A prefix is computed on its own only if that saves at least this many tokens of prompts: it costs a forward pass.
MIN_TOKENS_SAVED = 64


@dataclass
class Group(Generic[Member]):
    """Requests with the same prompt, in the caller's order."""

    prompt: tuple[int, ...]
    members: list[Member]


class PromptQueue(Generic[Member]):
    """Waiting requests, in the order in which their prompts first came.

    Attributes:
        prefix_length: first tokens that all prompts share which have come since the queue was last empty.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, ...], Group[Member]] = {}
        self.prefix_length = 0

    def __len__(self) -> int:
        """Waiting requests."""
        return sum(len(group.members) for group in self._waiting.values())

    def add(self, requests: Iterable[tuple[Sequence[int], Member]]) -> None:
        """Puts requests, each with its prompt, behind the others, those with a known prompt beside their like."""
        for prompt, member in requests:
            ids = tuple(prompt)
            self._waiting.setdefault(ids, Group(ids, [])).members.append(member)
        self.prefix_length = shared_prefix_length(list(self._waiting))

    def remove(self, unwanted: Callable[[Member], bool]) -> list[Member]:
        """Takes out the requests that are ``unwanted``."""
        removed = [member for group in self._waiting.values() for member in group.members if unwanted(member)]
        for group in list(self._waiting.values()):
            group.members = [member for member in group.members if not unwanted(member)]
            if not group.members:
                del self._waiting[group.prompt]
        return removed

    def take(self, room: int, may_split: bool) -> list[Group[Member]]:
        """Removes the next groups.

        Args:
            room: most requests to take.
            may_split: a group that does not fit may be cut, at the price of computing its prompt again later.

        Returns:
            Groups of at most ``room`` requests together; none if the next group neither fits nor may be cut.
        """
        taken: list[Group[Member]] = []
        for group in list(self._waiting.values()):
            if len(group.members) > room:
                break
            taken.append(self._waiting.pop(group.prompt))
            room -= len(group.members)
        if not taken and self._waiting and may_split and room:
            group = next(iter(self._waiting.values()))
            taken.append(Group(group.prompt, group.members[:room]))
            group.members = group.members[room:]
        return taken


def shared_prefix_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many first tokens all prompts share and are worth computing once: a system prompt, a chat template's start.

    Every prompt keeps at least one token behind the prefix, whose output gives its first new token.
    """
    if not prompts:
        return 0
    lowest, highest = min(prompts), max(prompts)
    length = 0
    for ours, theirs in zip(lowest, highest, strict=False):
        if ours != theirs:
            break
        length += 1
    length = min(length, min(len(prompt) for prompt in prompts) - 1)
    return length if length * (len(prompts) - 1) >= MIN_TOKENS_SAVED else 0


def within_budget(groups: Sequence[Group[Member]], prefix: int, max_tokens: int) -> Iterator[list[Group[Member]]]:
    """Cuts groups into runs of at most ``max_tokens`` prompt tokens behind the prefix; a longer prompt runs alone."""
    run: list[Group[Member]] = []
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
