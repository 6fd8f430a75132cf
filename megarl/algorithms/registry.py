"""A registry: names in a config on one side, functions or classes on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from megarl.errors import ConfigError

_Entry = TypeVar("_Entry")


class Registry(Mapping[str, _Entry], Generic[_Entry]):
    """Names mapped to entries; ``registry.register("name")`` is the decorator that adds one.

    Args:
        key: the config key that holds the name; errors begin with it.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._entries: dict[str, _Entry] = {}

    def register(self, *names: str) -> Callable[[_Entry], _Entry]:
        """Decorator that files an entry under each of ``names`` and returns it unchanged.

        Raises:
            ConfigError: another entry has one of the names.
        """

        def add(entry: _Entry) -> _Entry:
            """File the entry."""
            for name in names:
                if self._entries.get(name, entry) is not entry:
                    raise ConfigError(f"{self.key}={name!r} is registered already; choose another name")
                self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> _Entry:
        """The entry called ``name``.

        Raises:
            ConfigError: there is none; the message lists the known names.
        """
        if name not in self._entries:
            raise ConfigError(f"{self.key}={name!r} is not known; known are {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
