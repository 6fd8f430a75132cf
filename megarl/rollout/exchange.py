"""An engine's side of :class:`megarl.rollout.router.Router`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from megarl.rollout.interface import Completion, Request, RolloutEngine

# Others often end a moment after the first, and each report costs as much as a decoding step of a small model.
LINGER_S = 0.02


def exchange(
    engine: RolloutEngine, requests: Sequence[Request], aborted: Sequence[str], slice_s: float
) -> list[Completion]:
    """See :meth:`megarl.rollout.router.Replica.exchange`."""
    engine.submit(requests)
    engine.abort(aborted)
    done = engine.poll(slice_s)
    deadline = time.monotonic() + LINGER_S
    while done and (left := deadline - time.monotonic()) > 0:
        more = engine.poll(left)
        if not more:
            break
        done += more
    return done


class EngineReplica:
    """An engine in this process, as the router sees it.

    Args:
        engine: used by nobody else meanwhile.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    async def exchange(self, requests: Sequence[Request], aborted: Sequence[str], slice_s: float) -> list[Completion]:
        """See :meth:`megarl.rollout.router.Replica.exchange`."""
        return await asyncio.to_thread(exchange, self._engine, requests, aborted, slice_s)
