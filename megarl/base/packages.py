"""Optional and large packages: whether they are installed, the error for a missing one, and faster imports."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

from megarl.base.errors import ConfigError
from megarl.base.provenance import install_command


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without the seconds that importing may take.

    Args:
        module: dotted name; its parents are imported.
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def require_package(module: str, extra: str, user: str) -> None:
    """Check that an extra's module is installed.

    Args:
        user: what needs it, such as a key with its value.

    Raises:
        ConfigError: it is missing; the message has the installation command.
    """
    if not is_installed(module):
        raise ConfigError(
            f"{user} needs the package {module!r}, which is not installed: {install_command(extra)}",
            code="packages.not-installed",
        )


def require_sglang() -> None:
    """Check that SGLang is installed.

    Raises:
        ConfigError: it is missing; the message has the installation command.
    """
    if not is_installed("sglang"):
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang needs the package sglang (0.5.17 or later): "
            f"{install_command('sglang')}; on a machine without a GPU, the environment of launch/sglang_cpu.sh. "
            "Without SGLang: actor_rollout_ref.rollout.name=embedded",
            code="sglang.not-installed",
        )


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection during imports: their objects stay, and the collector would visit them repeatedly.

    Collections take a quarter of the CPU time of importing torch and transformers. Objects that exist at the end of the
    block are never visited again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_large(name: str) -> ModuleType:
    """Import a module that imports large packages."""
    if name in sys.modules:
        return sys.modules[name]  # garbage of an earlier job, in a sweep, must stay collectable
    with without_garbage_collection():
        return importlib.import_module(name)
