"""A user's own class, named in a configuration by file or by module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from hashlib import sha1
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from megarl.errors import ConfigError

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
    path, colon, name = spec.rpartition(":")
    if colon:
        module = _import_file(path, spec, what)
    else:
        path, _, name = spec.rpartition(".")
        if not path or spec.endswith(".py"):
            raise ConfigError(f"{what} {spec!r} names no class; write path.py:Class or package.module.Class")
        try:
            module = importlib.import_module(path)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{what} {spec!r}: importing {path} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        own = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base) and v is not base]
        raise ConfigError(f"{what} {spec!r}: {path} has no {base.__name__} called {name!r}; it has {own}")
    return found


def _import_file(path: str, spec: str, what: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{what} {spec!r}: there is no file {path}; write path.py:Class or package.module.Class")
    # one module per file, under a name of its own that shadows nothing
    name = f"megarl_own_{file.stem}_{sha1(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{what} {spec!r}: {path} is not a Python file (*.py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{what} {spec!r}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module
