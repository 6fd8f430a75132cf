"""The registry class: it maps names in the config to functions or classes, built in or from user code.

::

    TRACKERS: Registry[type[Tracker]] = Registry(
        "trainer.logger", loader=lambda spec, key: load_user_class(spec, Tracker, key)
    )

    @TRACKERS.register("console")
    class ConsoleTracker(Tracker): ...

    TRACKERS.find("console")              # a registered name
    TRACKERS.find("path.py:MyTracker")    # user code
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from megarl.base.errors import ConfigError, MegarlError
from megarl.base.user_code import is_spec

_Entry = TypeVar("_Entry")


class Registry(MutableMapping[str, _Entry], Generic[_Entry]):
    """Names mapped to entries; ``@registry.register("name")`` adds one, ``registry.find("name")`` returns it.

    Args:
        key: config key that holds the name; error messages start with it.
        lazy: module to import on the first look-up of a name, by name; importing it registers the entry.
        defaults: module to import before the first look-up of any name; importing it registers the built-in entries.
        loader: loads the entry of a spec such as ``path.py:name``, called with the spec and the key; None = registered
            names only. :func:`megarl.base.user_code.load_user_function` is one.
        hint: end of the message about an unknown name.
    """

    def __init__(
        self,
        key: str,
        *,
        lazy: Mapping[str, str] | None = None,
        defaults: str = "",
        loader: Callable[[str, str], _Entry] | None = None,
        error: type[MegarlError] = ConfigError,
        hint: str = "",
    ) -> None:
        self.key = key
        self._entries: dict[str, _Entry] = {}
        self._lazy = dict(lazy or {})
        self._defaults = defaults
        self._loader = loader
        self._error = error
        self._hint = hint or ("or write path.py:name" if loader is not None else "")

    def register(self, *names: str) -> Callable[[_Entry], _Entry]:
        """Return a decorator that registers an entry under each of ``names`` and returns it unchanged.

        Raises:
            ConfigError: another entry has one of the names.
        """

        def add(entry: _Entry) -> _Entry:
            for name in names:
                registered = self._entries.get(name, entry)
                if not _is_same(registered, entry):
                    text = f"{self.key}={name!r} is registered already, by {_origin(registered)}; choose another name"
                    raise self._error(text, code="config.name-taken")
                self._entries[name] = entry
            return entry

        return add

    def find(self, spec: str) -> _Entry:
        """Return the entry of a registered name, or load it from user code.

        Raises:
            ConfigError: the name is unknown, or loading the user's file, module or attribute fails.
        """
        if self._loader is None or spec in self or not is_spec(spec):
            return self[spec]
        return self._loader(spec, self.key)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry of a registered name, or ``default`` for an unknown name."""
        if name not in self:
            return default
        return self[name]

    def __getitem__(self, name: str) -> _Entry:
        """Return the entry of a registered name.

        Raises:
            ConfigError: the name is unknown; the message has the key, the nearest name and the known names.
        """
        self._import_defaults()
        if name not in self._entries and name in self._lazy:
            importlib.import_module(self._lazy[name])
        if name not in self._entries:
            raise self._error(self._unknown(name), code="config.unknown-name")
        return self._entries[name]

    def __setitem__(self, name: str, entry: _Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._import_defaults()
        return name in self._entries or name in self._lazy

    def __iter__(self) -> Iterator[str]:
        self._import_defaults()
        return iter(sorted({*self._entries, *self._lazy}))

    def __len__(self) -> int:
        self._import_defaults()
        return len({*self._entries, *self._lazy})

    def _import_defaults(self) -> None:
        if self._defaults:
            module, self._defaults = self._defaults, ""  # cleared first: the module may look up names
            try:
                importlib.import_module(module)
            except BaseException:
                self._defaults = module
                raise

    def _unknown(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, list(self), n=1)
        suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
        hint = f"; {self._hint}" if self._hint else ""
        return f"{self.key}={name!r} is unknown; {suggestion}known ones: {', '.join(self) or 'none'}{hint}"


def _is_same(first: Any, second: Any) -> bool:
    """Whether both entries are one object, or one definition imported twice."""
    if first is second:
        return True
    name = getattr(first, "__qualname__", "<locals>")
    return "<locals>" not in name and (_origin(first), name) == (_origin(second), getattr(second, "__qualname__", ""))


def _origin(entry: Any) -> str:
    return str(getattr(entry, "__module__", None) or type(entry).__module__)
