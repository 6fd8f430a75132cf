"""What differs between the Megatron-Core releases that megarl runs with, 0.16 and 0.19; nothing else knows of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor


def known_arguments(config: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that a configuration class of the installed release has.

    A field that the release does not have is left out where it is empty, so off; nothing else is.

    Args:
        config: a dataclass of Megatron's.
        arguments: values by field name.

    Raises:
        TypeError: a field that is gone is asked for with a value that means something; names it.
    """
    fields = {field.name for field in dataclasses.fields(config)}
    gone = {name for name, value in arguments.items() if name not in fields and value}
    if gone:
        raise TypeError(f"{config.__name__} of this Megatron-Core has no {sorted(gone)}")
    return {name: value for name, value in arguments.items() if name in fields}


def submodules_of(spec: Any) -> Any:
    """The parts of a module's specification, to look at or exchange.

    Later releases write a module and its parts as a ``functools.partial`` where earlier ones have a ``ModuleSpec``.
    """
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


class _NoFP8:
    """Stands in for Transformer Engine's state of 8-bit formats where there is none."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def fill_gaps() -> None:
    """Puts in place what recomputing norms (``recompute_modules=[layernorm]``) needs; once per process.

    Megatron asks Transformer Engine for 8-bit formats there, installed or not. Later releases, besides, compile an
    extension that lets two tensors share memory, which a CPU takes longer for than it ever saves: a copy does too.
    """
    if not random.HAVE_TE:
        for name, substitute in (
            ("FP8GlobalStateManager", _NoFP8),
            ("fp8_autocast", lambda **_: contextlib.nullcontext()),
            ("activation_recompute_forward", lambda **_: contextlib.nullcontext()),
        ):
            setattr(random, name, substitute)
    if hasattr(random, "_get_share_storage") and not torch.cuda.is_available():
        random._get_share_storage = lambda: _fill


@torch.no_grad()
def _fill(emptied: Tensor, again: Tensor) -> None:
    """Gives a tensor whose memory was released the contents of ``again``; whatever views it has see them, too."""
    memory = emptied.untyped_storage()
    memory.resize_(again.untyped_storage().size())
    memory.copy_(again.untyped_storage())
