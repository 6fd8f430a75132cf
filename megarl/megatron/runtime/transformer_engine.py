"""Transformer Engine's import: detection of a package that is installed but cannot be used, and its error.

A wheel for another torch or CUDA raises ``ImportError`` or ``OSError``. Megatron-Core expects only
``ModuleNotFoundError`` in one place, and would fail to import with it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys

from megarl.base.packages import is_installed

logger = logging.getLogger(__name__)

_PACKAGE = "transformer_engine"


@functools.cache
def transformer_engine_error() -> str:
    """Import Transformer Engine as Megatron does; return the error, empty if it is importable or not installed.

    A package that cannot be imported is hidden from later imports in this process, and a warning is logged. Call this
    before the first import of ``megatron.core``.
    """
    if not is_installed(_PACKAGE):
        return ""
    try:
        importlib.import_module(f"{_PACKAGE}.pytorch")
        importlib.import_module(f"{_PACKAGE}.pytorch.fp8")
    except Exception as error:  # ImportError, OSError of a shared library, RuntimeError of its version checks
        # Later imports, also of parts that loaded, fail with ModuleNotFoundError.
        for name in [name for name in sys.modules if name.startswith(f"{_PACKAGE}.")]:
            del sys.modules[name]
        sys.modules[_PACKAGE] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported
        text = f"{type(error).__name__}: {error}"
        logger.warning("Transformer Engine is installed but cannot be imported, torch's layers replace it: %s", text)
        return text
    return ""


def has_transformer_engine() -> bool:
    """Return whether Megatron-Core found a Transformer Engine that it can use."""
    has: bool = importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE
    return has
