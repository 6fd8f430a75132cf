"""Agent loops: rollout of multi-turn conversations into trajectories of token ids with masks and log-probs.

- ``types``: conversation, trajectory, and the interfaces between loops, engine and endpoint.
- ``loop``: base class, registry and transcript. ``runner``: leads many conversations and scores samples as they
  end. ``trajectories``: the batch of trajectories and its metrics. ``build``: builds the loops that a configuration
  names.
- ``tool_agent``, ``search_agent``, ``external_agent``: built-in loops beside the single-turn loop.
- ``frames``: tokens of the chat template between turns. ``retrieval_client``: client of a retrieval server.
- ``tools``: tools and tool calls. ``endpoint``: OpenAI-compatible chat server for external agents.
"""

from megarl.agents.build import (
    build_agent_loops,
    check_agent_loops,
    check_agent_names,
    conversation_limits,
    default_agent_loop,
)
from megarl.agents.external_agent import AgentTask
from megarl.agents.loop import AgentLoop, Transcript, register_agent_loop, turn_seed
from megarl.agents.trajectories import trajectories_to_batch, trajectory_metrics
from megarl.agents.types import AgentError, Conversation, ConversationLimits, Generate, Trajectory

__all__ = [
    "AgentError",
    "AgentLoop",
    "AgentTask",
    "Conversation",
    "ConversationLimits",
    "Generate",
    "Trajectory",
    "Transcript",
    "build_agent_loops",
    "check_agent_loops",
    "check_agent_names",
    "conversation_limits",
    "default_agent_loop",
    "register_agent_loop",
    "trajectories_to_batch",
    "trajectory_metrics",
    "turn_seed",
]
