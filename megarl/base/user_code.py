"""Loading of user code: modules, classes and functions named by file or by dotted path; imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from hashlib import sha1
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from megarl.base.errors import ConfigError

_Base = TypeVar("_Base")


def is_spec(text: str) -> bool:
    """Return whether a config value names user code (``path.py:name``, ``package.module.name``), not a plain name."""
    return ":" in text or "." in text


def import_file(path: str) -> ModuleType:
    """Import a Python file as a module, once per process.

    Raises:
        ConfigError: the file is missing or no Python file, or importing it fails.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no file {path}", code="config.user-code-file")
    # a module name per file, which shadows no installed module
    name = f"megarl_user_{file.stem}_{sha1(str(file.resolve()).encode(), usedforsecurity=False).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file (*.py)", code="config.user-code-suffix")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        text = f"importing {path} failed: {type(error).__name__}: {error}"
        raise ConfigError(text, code="config.user-code-import") from error
    return module


def _import_dotted(name: str) -> ModuleType:
    """Import ``package.module``."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        text = f"importing {name} failed: {type(error).__name__}: {error}"
        raise ConfigError(text, code="config.user-code-import") from error


def import_user_modules(*specs: str) -> None:
    """Import user modules for their registrations; each spec is ``path.py`` or ``package.module``.

    Raises:
        ConfigError: a module is missing, or importing it fails.
    """
    for spec in specs:
        if spec.endswith(".py"):
            import_file(spec)
        else:
            _import_dotted(spec)


def import_spec(spec: str, label: str, kind: str) -> tuple[ModuleType, str]:
    """Import the module of a spec; return it and the attribute name, which may be missing in the module.

    Args:
        label: start of error messages, such as the config key.

    Raises:
        ConfigError: the spec has no attribute name, the file or module is missing, or importing it fails.
    """
    remedy = f"write path.py:{kind} or package.module.{kind}"
    path, colon, name = spec.rpartition(":")
    if not colon:
        path, _, name = spec.rpartition(".")
        if not path or spec.endswith(".py"):
            raise ConfigError(f"{label} {spec!r} names no {kind}; {remedy}", code="config.user-code-spec")
    try:
        return (import_file(path) if colon else _import_dotted(path)), name
    except ConfigError as error:
        raise ConfigError(f"{label} {spec!r}: {error.text}; {remedy}", code=error.code) from error


def load_user_class(spec: str, base: Callable[..., _Base], label: str) -> type[_Base]:
    """Import the class of a spec and check its base class.

    Raises:
        ConfigError: the file, module or class is missing, importing it fails, or it does not derive from ``base``.
    """
    parent = cast("type[_Base]", base)
    module, name = import_spec(spec, label, "class")
    candidate = getattr(module, name, None)
    if not isinstance(candidate, type) or not issubclass(candidate, parent):
        defined = ((n, v) for n, v in vars(module).items() if isinstance(v, type))
        classes = [n for n, v in defined if issubclass(v, parent) and v is not parent]
        reason = f"there are {classes}" if classes else "it has none at all"
        if isinstance(candidate, type):
            reason += f"; {name} must derive from {parent.__module__}.{parent.__qualname__}"
        text = f"{label} {spec!r}: it has no {parent.__name__} called {name!r}; {reason}"
        raise ConfigError(text, code="config.user-code-class")
    return candidate


def load_user_function(spec: str, label: str, *, arguments: int | None = None) -> Callable[..., Any]:
    """Import the function of a spec, optionally checked to take a number of positional arguments.

    Args:
        arguments: number of positional arguments that a call passes; the function must be no coroutine function. None =
            no check.

    Raises:
        ConfigError: the file, module or function is missing, importing it fails, or the arguments do not fit.
    """
    module, name = import_spec(spec, label, "function")
    function = getattr(module, name, None)
    if function is None:
        text = f"{label} {spec!r}: it has no {name!r}; its functions are {public_functions(module)}"
        raise ConfigError(text, code="config.user-code-function")
    if not callable(function):
        text = f"{label} {spec!r} is a {type(function).__name__}; it must be a function"
        raise ConfigError(text, code="config.user-code-not-callable")
    if arguments is not None:
        number = f"{arguments} argument" if arguments == 1 else f"{arguments} arguments"
        if inspect.iscoroutinefunction(function):
            text = f"{label} {spec!r} is a coroutine function; it must be a plain function of {number}"
            raise ConfigError(text, code="config.user-code-coroutine")
        try:
            inspect.signature(function).bind(*[None] * arguments)
        except (TypeError, ValueError) as error:
            text = f"{label} {spec!r} must be a function of {number}: {error}"
            raise ConfigError(text, code="config.user-code-signature") from error
    return cast("Callable[..., Any]", function)


def public_functions(module: ModuleType) -> list[str]:
    """List the names of a module's public functions, sorted, for error messages."""
    return sorted(n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_"))
