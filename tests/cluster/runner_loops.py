"""Agent loops that fail, and an external agent, for the tests of agent runners."""

import base64
import json
import logging
import os
from urllib.request import Request, urlopen

from megarl.agents.loop import AgentLoop
from megarl.base.image_tokens import image_key


class Failing(AgentLoop):
    async def run(self, conversation, generate):
        logging.getLogger("megarl.agents.tools").warning("the tool is about to break")
        raise ValueError("broken tool")


class Deadly(AgentLoop):
    async def run(self, conversation, generate):
        os._exit(1)


def shows_another_picture(task):
    """Answer the prompt, then a picture of the row's own fact; return the digest of the prompt's file."""
    [shown, _] = task.messages[0]["content"]
    file = base64.b64decode(shown["image_url"]["url"].split(",")[1])
    history = list(task.messages)
    later = {"type": "image_url", "image_url": {"url": task.facts["later"]}}
    for messages in ([], [{"role": "user", "content": [later]}]):
        history += messages
        body = json.dumps({"model": task.model, "messages": history}).encode()
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        with urlopen(Request(f"{task.base_url}/chat/completions", body, headers), timeout=60) as response:
            history.append(json.load(response)["choices"][0]["message"])
    return {"digest": str(image_key(file))}
