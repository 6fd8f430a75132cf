"""Metric values that carry their reduction: how the values of a step's parts become one.

A plain number is a mean, weighted by the rows of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Metrics = dict[str, float]


class Total(float):
    """A count or an amount, which adds up over the parts of a step."""


class Largest(float):
    """A maximum: the largest value of the parts."""


class Smallest(float):
    """A minimum: the smallest value of the parts."""


_REDUCTIONS: dict[type[float], Callable[[Sequence[float]], float]] = {Total: sum, Largest: max, Smallest: min}


def combine_metrics(parts: Sequence[tuple[Mapping[str, float], int]]) -> Metrics:
    """Combine the metrics of a step's parts by their reductions.

    Args:
        parts: metrics and number of rows of each part; a part without a metric does not count in it.
    """
    names = dict.fromkeys(name for metrics, _ in parts for name in metrics)
    return {name: _combined([(metrics[name], rows) for metrics, rows in parts if name in metrics]) for name in names}


def _combined(weighted: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in weighted]
    if len(values) == 1:
        return values[0]
    kind = type(values[0])
    if reduce := _REDUCTIONS.get(kind):
        return kind(reduce(values))
    return sum(value * rows for value, rows in weighted) / max(sum(rows for _, rows in weighted), 1)
