"""A replica in the process of a test."""

import asyncio
from collections.abc import Sequence
from typing import Any

from megarl.rollout.serving import EngineServer


class EngineReplica:
    """An engine behind the router's interface; used by no one else while requests run."""

    def __init__(self, engine: Any) -> None:
        self._server = EngineServer(engine)

    async def accept(self, client: str, requests: Sequence[Any], aborted: Sequence[Any]) -> None:
        self._server.accept(client, requests, aborted)

    async def completions(self, client: str, wait_s: float) -> Any:
        return await asyncio.to_thread(self._server.completions, client, wait_s)
