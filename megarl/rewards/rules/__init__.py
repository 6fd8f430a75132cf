"""Built-in reward functions, each registered by name; importing them is cheap."""

from megarl.rewards.rules.agent_score import AGENT_RESULT, agent_score
from megarl.rewards.rules.code import code_tests
from megarl.rewards.rules.format import format_reward
from megarl.rewards.rules.judge import judge
from megarl.rewards.rules.mathematics import exact_integer, gsm8k, math_dapo, mathematics
from megarl.rewards.rules.search import search_exact_match, search_f1, search_structure, search_substring_match

__all__ = [
    "AGENT_RESULT",
    "agent_score",
    "code_tests",
    "exact_integer",
    "format_reward",
    "gsm8k",
    "judge",
    "math_dapo",
    "mathematics",
    "search_exact_match",
    "search_f1",
    "search_structure",
    "search_substring_match",
]
