"""Imports a user's own code, named in a configuration by file or by module; imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from hashlib import sha1
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from megarl.errors import ConfigError

_Base = TypeVar("_Base")


def import_file(path: str) -> ModuleType:
    """The module of a file, imported once per process.

    Args:
        path: of a Python file.

    Raises:
        ConfigError: there is no such file, it is no Python file, or importing it fails; says which.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no file {path}")
    # one module per file, under a name of its own that shadows nothing
    name = f"megarl_own_{file.stem}_{sha1(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file (*.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"importing {path} failed: {type(error).__name__}: {error}") from error
    return module


def import_dotted(name: str) -> ModuleType:
    """The module ``package.module``.

    Raises:
        ConfigError: importing it fails.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def import_own(*specs: str) -> None:
    """Imports modules for what they register, each named as ``path.py`` or ``package.module``.

    Raises:
        ConfigError: there is none, or importing it fails.
    """
    for spec in specs:
        if spec.endswith(".py"):
            import_file(spec)
        else:
            import_dotted(spec)


def locate(spec: str, what: str, kind: str) -> tuple[ModuleType, str]:
    """The module that a spec names, imported, and the name within it, which may not be there.

    Args:
        spec: ``path.py:name`` or ``package.module.name``.
        what: how messages call it, such as ``agent loop``.
        kind: ``class`` or ``function``, for messages.

    Raises:
        ConfigError: the spec has no name, there is no such file or module, or importing it fails.
    """
    ways = f"write path.py:{kind} or package.module.{kind}"
    path, colon, name = spec.rpartition(":")
    if not colon:
        path, _, name = spec.rpartition(".")
        if not path or spec.endswith(".py"):
            raise ConfigError(f"{what} {spec!r} names no {kind}; {ways}")
    try:
        return (import_file(path) if colon else import_dotted(path)), name
    except ConfigError as error:
        raise ConfigError(f"{what} {spec!r}: {error}; {ways}") from error


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
        others = f"there are {own}" if own else "it has none at all"
        if isinstance(found, type):
            others += f"; {name} must derive from {base.__module__}.{base.__qualname__}"
        raise ConfigError(f"{what} {spec!r}: it has no {base.__name__} called {name!r}; {others}")
    return found


def functions_of(module: ModuleType) -> list[str]:
    """Names of a module's functions, for messages."""
    return sorted(n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_"))
