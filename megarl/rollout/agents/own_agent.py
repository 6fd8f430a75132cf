"""A user's own function that leads a conversation with any client of OpenAI's chat interface."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megarl.errors import ConfigError
from megarl.own_module import functions_of, locate
from megarl.rollout.agents.loop import AgentError, Message

Agent: TypeAlias = "Callable[[AgentTask], Any | Awaitable[Any]]"


@dataclass(frozen=True)
class AgentTask:
    """What an agent gets to know of the conversation that it leads.

    Attributes:
        base_url: for a client of OpenAI's interface; this conversation's own.
        api_key: for the same client.
        model: the model to ask for.
        messages: the row's prompt.
        facts: the row's other columns, ``extra_info`` among them; not to be changed.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    messages: Sequence[Message]
    facts: Mapping[str, Any]

    @property
    def env(self) -> dict[str, str]:
        """The environment variables by which clients in a process of their own find the endpoint."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


def load_agent(spec: str) -> Agent:
    """The function that a spec names, imported.

    Args:
        spec: ``path.py:function`` or ``package.module.function``.

    Raises:
        ConfigError: there is no such file, module or function, importing it fails, or it cannot take a task.
    """
    module, name = locate(spec, "agent", "function")
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"agent {spec!r}: it has no function called {name!r}; there are {functions_of(module)}")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ConfigError(f"agent {spec!r} must take one argument, an AgentTask: {error}") from error
    except ValueError:  # some built-ins have no signature
        pass
    return found


async def run_agent(agent: Agent, task: AgentTask) -> Any:
    """What the agent returns.

    It runs in a thread of its own, an asynchronous one in an event loop there: whatever it does, it holds up nobody
    else. When this is cancelled an asynchronous agent is cancelled, too; a plain one is left to itself, and ends with
    its next request, which nobody answers any more.

    Raises:
        Exception: what the agent raised.
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
            done.set_exception(AgentError(f"the agent ended with {type(error).__name__}: {error}"))

    def work() -> None:
        result, failure = None, None
        try:
            result = agent(task)
            if inspect.isawaitable(result):
                result = asyncio.run(_cancellable(result, cancels))
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the run is over, and its loop closed
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
    own, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert own is not None
    cancels.append(lambda: loop.call_soon_threadsafe(own.cancel))
    return await work
