"""Reward of ``asynchronous.py``. Each reward process imports this file, so it imports nothing."""


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """Return a reward that differs between the samples of a prompt."""
    return float(len(set(solution_str)))


def score_or_constant(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """Return the same reward for all samples of every third prompt, as if it were too easy or too hard."""
    return 0.0 if int(ground_truth) % 3 == 0 else score(data_source, solution_str, ground_truth, extra_info)
