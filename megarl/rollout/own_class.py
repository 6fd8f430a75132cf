"""A user's own class, named in a configuration by file or by module."""

from __future__ import annotations

from typing import TypeVar

from megarl.errors import ConfigError
from megarl.own_module import locate

_Base = TypeVar("_Base")


def load_class(spec: str, base: type[_Base], what: str) -> type[_Base]:
    """The class that a spec names, imported.

    Args:
        spec: ``path.py:Class`` or ``package.module.Class``.
        base: what it must derive from.
        what: how messages call it, such as ``tool``.

    Raises:
        ConfigError: there is no such file, module or class, importing it fails, or it is not of that kind.
    """
    module, name = locate(spec, what, "class")
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        own = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base) and v is not base]
        raise ConfigError(f"{what} {spec!r}: it has no {base.__name__} called {name!r}; there are {own}")
    return found
