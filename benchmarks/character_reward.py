"""Reward of ``asynchronous.py``. Each reward process imports this file, so it imports nothing."""


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """Return a reward that differs between the samples of a prompt."""
    return float(len(set(solution_str)))
