"""A group's ranks as a short text, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_LISTED = 8


def describe_ranks(ranks: Sequence[int]) -> str:
    """``[0, 2]``; of many at equal distances ``[0:64:8]``, as a slice would have it."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > _LISTED and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"[{ranks[0]}:{ranks[-1] + 1}:{step}]"
    return f"[{', '.join(map(str, ranks))}]"


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks of a text of :func:`describe_ranks`."""
    inside = text.strip("[]")
    if ":" in inside:
        return tuple(range(*map(int, inside.split(":"))))
    return tuple(int(rank) for rank in inside.split(",") if rank.strip())
