"""Agent loops that fail, for the tests of agent runners."""

import logging
import os

from megarl.agents.loop import AgentLoop


class Failing(AgentLoop):
    async def run(self, conversation, generate):
        logging.getLogger("megarl.agents.tools").warning("the tool is about to break")
        raise ValueError("broken tool")


class Deadly(AgentLoop):
    async def run(self, conversation, generate):
        os._exit(1)
