"""What a reward function returned: the score, and what it wants recorded beside it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.errors import RewardError


class Outcome(NamedTuple):
    """One row's score and other fields, or in ``failure`` why there is none."""

    score: float
    extras: dict[str, Any]
    failure: str | None = None


def read_result(result: Any) -> Outcome:
    """Split what a reward function returned into the score and the rest.

    Raises:
        RewardError: there is no score in it, or it is not a number that float32 can hold.
    """
    score, extras = result, {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(f"the function returned a mapping without 'score'; it has {sorted(map(str, result))}")
        score, extras = result["score"], {str(name): value for name, value in result.items() if name != "score"}
    number = as_number(score)
    if number is None or not abs(number) <= torch.finfo(torch.float32).max:  # also False for NaN
        raise RewardError(f"the function returned {score!r:.200}; it must return a finite number, or one under 'score'")
    return Outcome(number, extras)


def as_number(value: Any) -> float | None:
    """The value as a float if it is one number of Python, numpy or torch, else None."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.item() if math.prod(value.shape) == 1 else None
    if not isinstance(value, numbers.Real | np.bool_):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def collect_extras(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics and columns of the fields beside the score.

    Returns:
        ``reward_extra/<name>/mean`` over the rows that have a finite number there, and ``reward_extra_<name>``, an
        object array ``[rows]`` with None where a row has no such field.
    """
    metrics: dict[str, float] = {}
    columns: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        column = np.empty(len(rows), dtype=object)
        for index, row in enumerate(rows):
            column[index] = row.get(name)
        columns[f"reward_extra_{name}"] = column
        found = [value for value in map(as_number, column) if value is not None and math.isfinite(value)]
        if found:
            metrics[f"reward_extra/{name}/mean"] = sum(found) / len(found)
    return metrics, columns
