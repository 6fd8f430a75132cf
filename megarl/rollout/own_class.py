"""A user's own class, named in a configuration by file or by module."""

from __future__ import annotations

from typing import TypeVar

from megarl.errors import ConfigError
from megarl.own_module import import_dotted, import_file

_Base = TypeVar("_Base")
_WAYS = "write path.py:Class or package.module.Class"


def load_class(spec: str, base: type[_Base], what: str) -> type[_Base]:
    """The class that a spec names, imported.

    Args:
        spec: ``path.py:Class`` or ``package.module.Class``.
        base: what it must derive from.
        what: how messages call it, such as ``tool``.

    Raises:
        ConfigError: there is no such file, module or class, importing it fails, or it is not of that kind.
    """
    path, colon, name = spec.rpartition(":")
    if not colon:
        path, _, name = spec.rpartition(".")
        if not path or spec.endswith(".py"):
            raise ConfigError(f"{what} {spec!r} names no class; {_WAYS}")
    try:
        module = import_file(path) if colon else import_dotted(path)
    except ConfigError as error:
        raise ConfigError(f"{what} {spec!r}: {error}; {_WAYS}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        own = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base) and v is not base]
        raise ConfigError(f"{what} {spec!r}: {path} has no {base.__name__} called {name!r}; it has {own}")
    return found
