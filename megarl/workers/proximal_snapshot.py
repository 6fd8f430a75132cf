"""The proximal policy of decoupled PPO: the actor's weights at the start of a sync interval, held in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from megarl.megatron import MegatronEngine
from megarl.megatron.runtime.host_memory import HostCopy


class ProximalSnapshot:
    """Keeps a copy of the actor's weights, or with LoRA of its adapters, while the actor goes on learning.

    The next copy reuses the host memory of the last one, because page-locking new memory is slow.

    Args:
        has_adapters: whether the model has adapters, which alone are trained and copied.
    """

    def __init__(self, engine: MegatronEngine, has_adapters: bool) -> None:
        self._engine = engine
        self._has_adapters = has_adapters
        self._weights: HostCopy | None = None
        self._adapters: Mapping[str, Tensor] | None = None
        self._is_current = False

    @property
    def exists(self) -> bool:
        """Whether there is a copy."""
        return self._weights is not None or self._adapters is not None

    def take(self) -> None:
        """Copy the current weights, which replace an earlier copy; may communicate."""
        if self._has_adapters:
            self._adapters = self._engine.copy_adapters()
        else:
            self._weights = self._engine.copy_weights(reuse=self._weights)
        self._is_current = True

    def free(self) -> None:
        """Free the copy."""
        self._weights = self._adapters = None

    def mark_changed(self) -> None:
        """Note that the actor's weights may differ from the copy from now on."""
        self._is_current = False

    def in_model(self) -> AbstractContextManager[None]:
        """Swap in the snapshot's weights within the context; a no-op while the weights are unchanged."""
        if self._is_current or not self.exists:
            return contextlib.nullcontext()
        if self._adapters is not None:
            return self._engine.swapped_adapters(self._adapters)
        assert self._weights is not None
        return self._engine.swapped_weights(self._weights)
