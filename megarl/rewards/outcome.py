"""Outcomes of reward functions: the score and the extra fields, or the kind of failure. Imports no torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.base.errors import RewardError

if TYPE_CHECKING:
    import numpy as np

BAD_SAMPLE, TIMEOUT, INFRASTRUCTURE, CONVERSATION = "bad_sample", "timeout", "infrastructure", "conversation"
"""Kinds of failure: the function raised or returned no number; it took too long; a service or process failed; the
conversation of the agent loop had failed."""
OUTCOME = "reward_outcome"
"""Column with the outcomes of rows that were scored before their batch was complete; None for other rows."""
REWARD_COUNTS = "reward_counts"
"""Key in the ``meta_info`` of a batch: retries and replaced processes of these rows, as ``RunCounts``."""
EXTRA = "reward_extra_"
"""Prefix of the columns with the extra fields of the functions, which dumps and validation report."""
LARGEST = 3.4028234663852886e38
"""Largest float32 number, since scores are stored as float32."""
_LARGEST_INT = 2**63 - 1


class Outcome(NamedTuple):
    """Score and extra fields of one row; for a row without a score the cause (``failure``) and its ``kind``."""

    score: float
    extras: dict[str, Any]
    failure: str | None = None
    kind: str | None = None


def failed_outcome(kind: str, failure: str) -> Outcome:
    """Return the outcome of a row without a score."""
    return Outcome(0.0, {}, failure, kind)


def read_result(result: Any) -> Outcome:
    """Split the result of a reward function into the score and the extra fields, as plain data.

    Raises:
        RewardError: the result has no score, or the score is no finite float32 number.
    """
    score, extras = result, {}
    if isinstance(result, Mapping):
        if "score" not in result:
            text = f"the function returned a mapping without 'score'; it has {sorted(map(str, result))}"
            raise RewardError(text, code="reward.no-score")
        score = result["score"]
        extras = {str(name): to_json_value(value) for name, value in result.items() if name != "score"}
    number = as_number(score)
    if number is None or not abs(number) <= LARGEST:  # also False for NaN
        text = f"the function returned {score!r:.200}; it must return a finite number, or one under 'score'"
        raise RewardError(text, code="reward.score-not-number")
    return Outcome(number, extras)


def as_number(value: Any) -> float | None:
    """Convert one number of Python, numpy or torch to a float; None for any other value."""
    if hasattr(value, "shape") and hasattr(value, "item"):  # an array, a tensor, or one of their scalars
        value = value.item() if math.prod(value.shape) == 1 else None
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON data: None, booleans, numbers, strings, and lists and mappings of them.

    Arrays and tensors become lists; any other object becomes its string.
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST_INT else str(value)
    if isinstance(value, Mapping):
        return {str(name): to_json_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(entry) for entry in value]
    if hasattr(value, "tolist"):
        return to_json_value(value.tolist())
    return str(value)


def collect_extras(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Convert the extra fields of all rows to metrics and columns.

    Returns:
        ``reward_extra/<name>/mean`` over the rows with a finite number, and ``reward_extra_<name>``, an object array
        ``[rows]`` with None for rows without the field.
    """
    metrics: dict[str, float] = {}
    columns: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[f"{EXTRA}{name}"] = column = object_column([row.get(name) for row in rows])
        values = [value for value in map(as_number, column) if value is not None and math.isfinite(value)]
        if values:
            metrics[f"reward_extra/{name}/mean"] = sum(values) / len(values)
    return metrics, columns


def object_column(values: Sequence[Any]) -> np.ndarray:
    """Return values of any type as an object array ``[rows]``."""
    import numpy as np

    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column
