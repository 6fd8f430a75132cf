"""Conversations that a user's own program leads, with any framework, by requests to the run's chat endpoint."""

from __future__ import annotations

import asyncio
import copy
import math
import numbers
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from megarl.errors import ConfigError
from megarl.rewards import AGENT_RESULT
from megarl.rollout.agents.loop import AgentError, AgentLoop, Conversation, Generate, Trajectory
from megarl.rollout.agents.own_agent import Agent, AgentTask, load_agent, run_agent
from megarl.rollout.agents.registry import register_agent_loop
from megarl.rollout.endpoint.request import MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import AnswersConfig
    from megarl.rollout.endpoint import Session

_PATH = "actor_rollout_ref.rollout"


@register_agent_loop("external_agent")
class ExternalAgent(AgentLoop):
    """Opens a session of the endpoint for each conversation and has a function lead it.

    Args:
        agent: takes an :class:`AgentTask`; returns None, a number (its score), or a mapping.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @classmethod
    def check(cls, config: AnswersConfig, **options: Any) -> None:
        """As the base says."""
        rollout = config.actor_rollout_ref.rollout
        if not rollout.serves_endpoint:
            raise ConfigError(f"external_agent generates over the chat endpoint; set {_PATH}.endpoint.enable=true")
        load_agent(cls._spec(config, **options))

    @classmethod
    def create(cls, config: AnswersConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """As the base says; ``function`` may name another agent than the configuration does."""
        return cls(load_agent(cls._spec(config, **options)))

    @staticmethod
    def _spec(config: AnswersConfig, function: str | None = None) -> str:
        spec = function or config.actor_rollout_ref.rollout.agent.external_agent
        if spec is None:
            raise ConfigError(f"external_agent needs {_PATH}.agent.external_agent, path.py:function")
        return spec

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Until the function returns.

        A conversation whose tokens or turns are used up has ended, even where the function takes that as an error.
        """
        if self.endpoint is None:
            raise AgentError("external_agent was built without the run's endpoint")
        async with self.endpoint.session(conversation, generate) as access:
            task = AgentTask(
                base_url=access.base_url,
                api_key=access.api_key,
                model=MODEL,
                messages=[copy.copy(message) for message in conversation.messages],
                facts=conversation.facts,
            )
            try:
                result = await _unless_failed(run_agent(self._agent, task), access.session)
            except Exception:
                if access.session.failure.done() or not access.session.met_limit:
                    raise
                result = None
        trajectory = access.session.trajectory()
        return replace(trajectory, fields={AGENT_RESULT: _as_mapping(result)})


async def _unless_failed(work: Any, session: Session) -> Any:
    """The agent's result, or the failure of a generation, whichever comes first."""
    agent = asyncio.ensure_future(work)
    try:
        await asyncio.wait([agent, session.failure], return_when=asyncio.FIRST_COMPLETED)
        if session.failure.done():
            session.failure.result()
        return await agent
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)


def _as_mapping(result: Any) -> Mapping[str, Any]:
    """What an agent returned, with a lone number as its score.

    Raises:
        AgentError: it is something else.
    """
    if result is None:
        return {}
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, numbers.Real) and math.isfinite(result):
        return {"score": float(result)}
    raise AgentError(f"an agent returns None, a finite number or a mapping, not {result!r:.100}")
