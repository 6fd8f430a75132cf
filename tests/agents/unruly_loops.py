"""Agent loops that end in unusual ways, for the tests of the agent runner."""

import asyncio
import sys
from dataclasses import replace

from megarl.agents.loop import SingleTurnLoop


class ReturnsNothing(SingleTurnLoop):
    async def run(self, conversation, generate):
        await super().run(conversation, generate)


class Exits(SingleTurnLoop):
    async def run(self, conversation, generate):
        sys.exit("a library gives up")


class ExitsInThread(SingleTurnLoop):
    async def run(self, conversation, generate):
        await asyncio.to_thread(sys.exit, 3)


class CancelsItself(SingleTurnLoop):
    async def run(self, conversation, generate):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)


class OutsideTheVocabulary(SingleTurnLoop):
    async def run(self, conversation, generate):
        await generate([10**6], conversation.params, seed=0, key="k")


class TooManyTokens(SingleTurnLoop):
    async def run(self, conversation, generate):
        await generate([3], replace(conversation.params, max_new_tokens=2**40), seed=0, key="k")


class UnusableParameters(SingleTurnLoop):
    async def run(self, conversation, generate):
        await generate([3], replace(conversation.params, top_k=2**63), seed=0, key="k")
