"""megarl: reinforcement learning for large language models on Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.base.version import __version__

if TYPE_CHECKING:
    from megarl.api import Run, RunFailed, train

__all__ = ["Run", "RunFailed", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """Import the Python API at its first use: workers import this package too."""
    if name not in __all__:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    from megarl import api

    return getattr(api, name)
