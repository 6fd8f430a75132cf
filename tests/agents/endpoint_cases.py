"""Helpers of the endpoint tests: a listening endpoint, agents as functions, a plain client."""

import importlib.util
from contextlib import contextmanager

import httpx
from agent_cases import lead_all, sampling

from megarl.agents import AgentTask, Conversation
from megarl.agents.endpoint import ChatFormat, Endpoint, EndpointAddress, ExternalRequestLimits
from megarl.agents.event_loop import EventLoopThread
from megarl.agents.external_agent import ExternalAgent
from megarl.agents.tools import PARSERS

HAS_OPENAI = importlib.util.find_spec("openai") is not None
USER = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@contextmanager
def listening(tokenizer, wait_s=30.0, tokens=600, address=None, **options):
    """Start an endpoint."""
    chat = ChatFormat(tokenizer, PARSERS["hermes"], **{"max_tokens": tokens} | options)
    limits, loop = ExternalRequestLimits(sampling(), tokens, wait_s), EventLoopThread("endpoint")
    try:
        with Endpoint(chat, limits, address or EndpointAddress(), loop) as endpoint:
            yield endpoint
    finally:
        loop.close()


def lead(endpoint, generate, agent, conversations=None):
    """Run conversations with an agent over the endpoint; return the trajectories."""
    loop = ExternalAgent(agent)
    loop.endpoint = endpoint
    conversations = conversations or [talk()]
    return endpoint.loop.run(lead_all(conversations, {"external_agent": loop}, generate))


def talk(key="k", **fields):
    return Conversation(USER, fields.pop("params", sampling()), key=key, agent_name="external_agent", **fields)


def complete(at: AgentTask | Endpoint, messages, **fields):
    """Return the body of a chat completion; an error raises :class:`Refused`."""
    response = post(at, {"messages": messages, **fields})
    if response.status_code != 200:
        raise Refused(response)
    return response.json()


def post(at: AgentTask | Endpoint, body):
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return client(at).post(f"{at.base_url}/chat/completions", **content)


def client(at, **options):
    """Return an HTTP client, without certificates, which are slow to load."""
    return httpx.Client(headers={"Authorization": f"Bearer {at.api_key}"}, **{"timeout": 60, "verify": False} | options)


class Refused(Exception):
    """An error response."""

    def __init__(self, response):
        super().__init__(response.text)
        self.status, self.error = response.status_code, response.json()["error"]


def message_of(body, choice=0):
    return body["choices"][choice]["message"]
