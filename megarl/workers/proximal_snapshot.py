"""The proximal policy of decoupled PPO: the actor's weights at the start of a sync interval, held in host memory."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from megarl.megatron.engine.megatron_engine import MegatronEngine, TrainedCopy


class ProximalSnapshot:
    """Keeps a copy of the actor's weights, or with LoRA of its adapters, while the actor goes on learning.

    The next copy reuses the host memory of the last one, because page-locking new memory is slow.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._copy: TrainedCopy | None = None
        self._is_current = False

    @property
    def exists(self) -> bool:
        """Whether there is a copy."""
        return self._copy is not None

    def take(self) -> None:
        """Copy the current weights, which replace an earlier copy; may communicate."""
        self._copy = self._engine.copy_weights(reuse=self._copy)
        self._is_current = True

    def free(self) -> None:
        """Free the copy."""
        self._copy = None

    def mark_changed(self) -> None:
        """Note that the actor's weights may differ from the copy from now on."""
        self._is_current = False

    def in_model(self) -> AbstractContextManager[None]:
        """Swap in the snapshot's weights within the context; a no-op while the weights are unchanged."""
        if self._is_current or self._copy is None:
            return contextlib.nullcontext()
        return self._engine.swapped_weights(self._copy)
