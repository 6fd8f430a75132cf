"""A replica in the process of a test."""

import asyncio

from megarl.rollout.serving import EngineServer


class EngineReplica:
    """An engine behind the router's interface; used by no one else while requests run."""

    def __init__(self, engine):
        self._server = EngineServer(engine)

    async def accept(self, client, requests, aborted):
        self._server.accept(client, requests, aborted)

    async def completions(self, client, wait_s):
        return await asyncio.to_thread(self._server.completions, client, wait_s)
