"""Imports of large packages."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType


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
