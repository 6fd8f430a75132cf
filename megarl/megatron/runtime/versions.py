"""Differences between Megatron-Core 0.16 and 0.19, and Transformer Engines that cannot be imported."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megarl.base.compilers import missing_extension_tools
from megarl.base.packages import is_installed

logger = logging.getLogger(__name__)

_ENGINE = "transformer_engine"


def supported_arguments(config: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the ``arguments`` that a configuration class of the installed release does not have.

    Only an empty value, which turns a feature off, may be dropped.

    Raises:
        TypeError: a missing field has a non-empty value; names it.
    """
    fields = {field.name for field in dataclasses.fields(config)}
    unsupported = {name for name, value in arguments.items() if name not in fields and value}
    if unsupported:
        raise TypeError(f"{config.__name__} of this Megatron-Core has no {sorted(unsupported)}")
    return {name: value for name, value in arguments.items() if name in fields}


def submodules_of(spec: Any) -> Any:
    """Return a specification's submodules: later releases have a ``functools.partial``, earlier a ``ModuleSpec``."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def patch_megatron_gaps() -> None:
    """Patch the functions that recomputing norms (``recompute_modules=[layernorm]``) needs; once per process.

    Megatron calls Transformer Engine's 8-bit functions there, installed or not. Later releases also compile an
    extension that lets two tensors share memory. A copy replaces it on a CPU, where the compilation costs more than it
    saves, and on machines that cannot compile.
    """
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not random.HAVE_TE:
        for name, substitute in (
            ("FP8GlobalStateManager", SimpleNamespace(is_fp8_enabled=lambda: False)),
            ("fp8_autocast", lambda **_: contextlib.nullcontext()),
            ("activation_recompute_forward", lambda **_: contextlib.nullcontext()),
        ):
            setattr(random, name, substitute)
    if hasattr(random, "_get_share_storage") and (not torch.cuda.is_available() or missing_extension_tools()):
        random._get_share_storage = lambda: _fill


@torch.no_grad()
def _fill(emptied: Tensor, recomputed: Tensor) -> None:
    """Restore the contents of a tensor whose memory was released; views of it see them too."""
    memory = emptied.untyped_storage()
    memory.resize_(recomputed.untyped_storage().size())
    memory.copy_(recomputed.untyped_storage())


@functools.cache
def transformer_engine_error() -> str:
    """Import Transformer Engine as Megatron does; return the error, empty if it is importable or not installed.

    Call this before the first import of ``megatron.core``, which expects only ``ModuleNotFoundError`` in one place: a
    wheel for another torch or CUDA raises other errors. Such a package is hidden from later imports in this process,
    and a warning is logged.
    """
    if not is_installed(_ENGINE):
        return ""
    try:
        importlib.import_module(f"{_ENGINE}.pytorch")
        importlib.import_module(f"{_ENGINE}.pytorch.fp8")
    except Exception as error:  # ImportError, OSError of a shared library, RuntimeError of its version checks
        # Later imports, also of parts that loaded, fail with ModuleNotFoundError.
        for name in [name for name in sys.modules if name.startswith(f"{_ENGINE}.")]:
            del sys.modules[name]
        sys.modules[_ENGINE] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported
        text = f"{type(error).__name__}: {error}"
        logger.warning("Transformer Engine is installed but cannot be imported, torch's layers replace it: %s", text)
        return text
    return ""


def has_transformer_engine() -> bool:
    """Return whether Megatron-Core found a Transformer Engine that it can use."""
    has: bool = importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE
    return has
