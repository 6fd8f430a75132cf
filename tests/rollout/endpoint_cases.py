"""What tests of the chat endpoint share: an endpoint over any generator, agents as functions, a plain client."""

from contextlib import contextmanager

import httpx
from agent_cases import sampling

from megarl.rollout.agents import AgentTask, Conversation, run_all
from megarl.rollout.agents.external_agent import ExternalAgent
from megarl.rollout.endpoint import Address, ChatFormat, Endpoint, OutsideLimits
from megarl.rollout.tools import find_parser

USER = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@contextmanager
def listening(tokenizer, wait_s=30.0, tokens=600, address=None, **options):
    """An endpoint that listens."""
    chat = ChatFormat(tokenizer, find_parser("hermes"), **options)
    with Endpoint(chat, OutsideLimits(sampling(), tokens, wait_s), address or Address()) as endpoint:
        yield endpoint


def lead(endpoint, generate, agent, conversations=None, fatal=()):
    """Trajectories of conversations that an agent leads over the endpoint."""
    loop = ExternalAgent(agent)
    loop.endpoint = endpoint
    conversations = conversations or [talk()]
    return endpoint.run(run_all(conversations, {"external_agent": loop}, generate, fatal=fatal))


def talk(key="k", **fields):
    return Conversation(USER, fields.pop("params", sampling()), key=key, agent_name="external_agent", **fields)


def ask(at: AgentTask | Endpoint, messages, **fields):
    """The body of the answer to a chat completion; an error raises :class:`Refused`."""
    response = post(at, {"messages": messages, **fields})
    if response.status_code != 200:
        raise Refused(response)
    return response.json()


def post(at: AgentTask | Endpoint, body):
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    return client(at).post(f"{at.base_url}/chat/completions", **given)


def client(at, **options):
    """Of HTTP. Without certificates, which take longer to read than anything here takes."""
    return httpx.Client(headers={"Authorization": f"Bearer {at.api_key}"}, **{"timeout": 60, "verify": False} | options)


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, response):
        super().__init__(response.text)
        self.status, self.error = response.status_code, response.json()["error"]


def said(body, choice=0):
    return body["choices"][choice]["message"]
