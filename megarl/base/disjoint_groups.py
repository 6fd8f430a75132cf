"""Groups of work on disjoint resources, for passes on separate devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


def disjoint_groups(items: Iterable[_Item], resources: Callable[[_Item], Iterable[Hashable]]) -> list[list[_Item]]:
    """Group items so that no two of a group share a resource; each is in the first possible group.

    Items with a common resource keep their order: a later one is in a later group.
    """
    groups: list[list[_Item]] = []
    used: list[set[Hashable]] = []
    for item in items:
        needed = set(resources(item))
        number = max((index + 1 for index, taken in enumerate(used) if needed & taken), default=0)
        if number == len(groups):
            groups.append([])
            used.append(set())
        groups[number].append(item)
        used[number] |= needed
    return groups
