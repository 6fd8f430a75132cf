"""The external agent loop: a user's function leads the conversation over the run's OpenAI-compatible chat endpoint.

The function may use any framework with an OpenAI client. It runs in its own thread, so it may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from megarl.agents.loop import AgentLoop, register_agent_loop
from megarl.agents.types import LARGEST_BODY, AgentError, AgentSession, Conversation, Generate, Message, Trajectory
from megarl.base.errors import ConfigError
from megarl.base.user_code import import_spec, public_functions
from megarl.data.images import IMAGES, data_url
from megarl.rewards import AGENT_RESULT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig

_PATH = "actor_rollout_ref.rollout"

Agent: TypeAlias = "Callable[[AgentTask], Any | Awaitable[Any]]"


@dataclass(frozen=True)
class AgentTask:
    """Input of an external agent: one conversation and the access to its chat endpoint.

    Attributes:
        base_url: base URL for an OpenAI client, unique to this conversation.
        messages: prompt; images are parts of type ``image_url`` with the files as data URLs.
        facts: other columns of the data row, such as ``extra_info``; read-only.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    messages: Sequence[Message]
    facts: Mapping[str, Any]

    @property
    def env(self) -> dict[str, str]:
        """Environment variables through which an OpenAI client in another process finds the endpoint."""
        direct = {name: os.environ[name] for name in ("no_proxy", "NO_PROXY") if name in os.environ}
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model} | direct


@register_agent_loop("external_agent")
class ExternalAgent(AgentLoop):
    """Opens an endpoint session for each conversation and calls the user's function.

    Args:
        agent: function of an :class:`AgentTask`; returns None, a number (its score), or a mapping.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @classmethod
    def check(cls, config: GenerationJobConfig, **options: Any) -> None:
        """Check that the endpoint is enabled and that the function can be imported."""
        rollout = config.actor_rollout_ref.rollout
        if not rollout.serves_endpoint:
            text = f"external_agent generates over the chat endpoint; set {_PATH}.endpoint.enable=true"
            raise ConfigError(text, code="agent.endpoint-disabled")
        load_agent(cls._spec(config, **options))

    @classmethod
    def create(cls, config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """Build the loop; the option ``function`` overrides the configured agent."""
        return cls(load_agent(cls._spec(config, **options)))

    @staticmethod
    def _spec(config: GenerationJobConfig, function: str | None = None) -> str:
        spec = function or config.actor_rollout_ref.rollout.agent.external_agent
        if spec is None:
            raise ConfigError(f"set {_PATH}.agent.external_agent=path.py:function", code="agent.no-external-agent")
        return spec

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Run the agent until it returns.

        A conversation that reached its limit of tokens or turns has ended normally, even if the agent raises because of
        it.
        """
        if self.endpoint is None:
            raise AgentError("external_agent was built without the run's endpoint", code="agent.no-endpoint")
        messages = await asyncio.to_thread(_with_files, conversation)
        async with self.endpoint.session(conversation, generate) as access:
            task = AgentTask(
                base_url=access.base_url,
                api_key=access.api_key,
                model=access.model,
                messages=messages,
                facts=conversation.facts,
            )
            try:
                result = await _result_or_failure(run_agent(self._agent, task), access.session)
            except Exception:
                if access.session.failure.done() or not access.session.met_limit:
                    raise
                result = None
        trajectory = access.session.trajectory()
        return replace(trajectory, fields={AGENT_RESULT: _result_mapping(result)})


def _with_files(conversation: Conversation) -> list[Message]:
    """Return the messages of a prompt with its images as OpenAI's parts.

    Raises:
        AgentError: no request to the endpoint could contain them.
    """
    files = [image.file for image in conversation.facts.get(IMAGES) or ()]
    if (size := sum(len(file) for file in files) * 4 // 3) > LARGEST_BODY:
        text = f"the {len(files)} images of the prompt have {size} bytes in base64; the endpoint reads at most"
        raise AgentError(f"{text} {LARGEST_BODY} in a request; resize them", code="image.too-many-bytes")
    images = iter(conversation.facts.get(IMAGES) or ())

    def shown(part: Mapping[str, Any]) -> Mapping[str, Any]:
        image = part["type"] == "image"
        return {"type": "image_url", "image_url": {"url": data_url(next(images))}} if image else part

    return [
        {**m, "content": [shown(part) for part in m["content"]]} if isinstance(m["content"], list) else copy.copy(m)
        for m in conversation.messages
    ]


def load_agent(spec: str) -> Agent:
    """Import the agent function of a spec, ``path.py:function`` or ``package.module.function``.

    Raises:
        ConfigError: the file, module or function is missing, importing it fails, or it does not take one argument.
    """
    module, name = import_spec(spec, "agent", "function")
    function: Agent | None = getattr(module, name, None)
    if not callable(function):
        text = f"agent {spec!r}: it has no function called {name!r}; there are {public_functions(module)}"
        raise ConfigError(text, code="config.user-code-function")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        text = f"agent {spec!r} must take one argument, an AgentTask: {error}"
        raise ConfigError(text, code="config.user-code-signature") from error
    except ValueError:  # some built-ins have no signature
        pass
    return function


async def run_agent(agent: Agent, task: AgentTask) -> Any:
    """Run an agent in its own thread and return its result.

    A coroutine function gets an event loop in that thread, so blocking calls do not delay other conversations. If this
    coroutine is cancelled, an asynchronous agent is cancelled too. A plain function cannot be cancelled: it ends with
    its next request, which the closed session refuses.

    Raises:
        Exception: any exception raised by the agent.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    cancels: list[Callable[[], object]] = []

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        elif isinstance(error, Exception):
            done.set_exception(error)
        else:  # sys.exit in an agent must not end the run
            done.set_exception(
                AgentError(f"the agent ended with {type(error).__name__}: {error}", code="agent.exit-called")
            )

    def work() -> None:
        result, failure = None, None
        try:
            result = agent(task)
            if inspect.isawaitable(result):
                result = asyncio.run(_cancellable(result, cancels))
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the run has ended and closed its event loop
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True, name="external-agent").start()
    try:
        return await done
    except asyncio.CancelledError:
        for cancel in cancels:
            with contextlib.suppress(RuntimeError):
                cancel()
        raise


async def _cancellable(work: Awaitable[Any], cancels: list[Callable[[], object]]) -> Any:
    current, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert current is not None
    cancels.append(lambda: loop.call_soon_threadsafe(current.cancel))
    return await work


async def _result_or_failure(work: Any, session: AgentSession) -> Any:
    """Wait for the agent's result or the failure of a generation, and return or raise the first of them."""
    agent = asyncio.ensure_future(work)
    try:
        await asyncio.wait([agent, session.failure], return_when=asyncio.FIRST_COMPLETED)
        if session.failure.done():
            session.failure.result()
        return await agent
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)


def _result_mapping(result: Any) -> Mapping[str, Any]:
    """Convert an agent's result to a mapping; a plain number becomes ``score``.

    Raises:
        AgentError: the result is of another type.
    """
    if result is None:
        return {}
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, numbers.Real) and math.isfinite(result):
        return {"score": float(result)}
    text = f"the agent returned {result!r:.100}; it must return None, a finite number or a mapping"
    raise AgentError(text, code="agent.result-type")
