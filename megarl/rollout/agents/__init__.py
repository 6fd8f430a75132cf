"""Agents: loops that lead a conversation, turn by turn, to a trajectory of tokens with a mask.

``loop`` is the contract, ``runner`` leads many conversations at once, ``registry`` finds loops by name, ``build`` makes
those of a configuration, ``batch`` and ``metrics`` say what came of them. ``single_turn``, ``tool_agent``,
``search_agent`` and ``external_agent`` are the loops that come with megarl; ``frames`` is what a chat template puts
between turns, ``own_agent`` runs a function that leads a conversation over the endpoint.
"""

from megarl.rollout.agents.batch import trajectories_to_batch
from megarl.rollout.agents.build import (
    build_agent_loops,
    check_agent_loops,
    check_agent_names,
    conversation_limits,
    default_agent_loop,
)
from megarl.rollout.agents.loop import (
    AgentError,
    AgentLoop,
    Conversation,
    Generate,
    Limits,
    Trajectory,
    Transcript,
    turn_seed,
)
from megarl.rollout.agents.metrics import trajectory_metrics
from megarl.rollout.agents.own_agent import AgentTask
from megarl.rollout.agents.registry import find_agent_loop, known_agent_loops, register_agent_loop
from megarl.rollout.agents.runner import run_all

__all__ = [
    "AgentError",
    "AgentLoop",
    "AgentTask",
    "Conversation",
    "Generate",
    "Limits",
    "Trajectory",
    "Transcript",
    "build_agent_loops",
    "check_agent_loops",
    "check_agent_names",
    "conversation_limits",
    "default_agent_loop",
    "find_agent_loop",
    "known_agent_loops",
    "register_agent_loop",
    "run_all",
    "trajectories_to_batch",
    "trajectory_metrics",
    "turn_seed",
]
