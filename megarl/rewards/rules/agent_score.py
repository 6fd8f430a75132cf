"""The reward of external agents that compute their score."""

from __future__ import annotations

from typing import Any

from megarl.base.errors import RewardError
from megarl.rewards.registry import register_reward

AGENT_RESULT = "agent_result"
"""Column with the results of external agents, and its key in ``extra_info``."""


@register_reward("agent_score")
def agent_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Return an external agent's ``score`` and the other fields of its result.

    Args:
        extra_info: ``agent_result`` has the agent's result.

    Raises:
        RewardError: the result has no score.
    """
    result = extra_info.get(AGENT_RESULT, {})
    if "score" not in result:
        text = f"the agent returned no score but {result!r:.200}; it must return a number, or one as 'score'"
        raise RewardError(text, code="reward.agent-score")
    return dict(result)
