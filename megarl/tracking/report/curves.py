"""Metrics as curves that a page can hold: few points, whatever the length of the run, and no outlier lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MOST_POINTS = 600
TIMED = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
"""What adds up to the time of training: the phases outside a step are validation and saving."""

Rows = Sequence[Mapping[str, float]]


def thin(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> dict[str, Any]:
    """A curve of at most ``most`` points.

    A curve of more is cut into that many stretches, of which the mean and the least and greatest value are kept, so
    that the line shows what is typical and the band around it every spike.

    Args:
        steps: ``[n]``, ascending.
        values: ``[n]``, finite.
        most: points to keep.

    Returns:
        ``x``, ``y`` and ``n`` (values before thinning), and ``low`` and ``high`` where there were too many. ``x`` is
        the last step of a stretch.
    """
    if len(values) <= most:
        return {"x": steps.tolist(), "y": _short(values), "n": len(values)}
    begins = np.arange(most) * len(values) // most
    ends = np.append(begins[1:], len(values))
    return {
        "x": steps[ends - 1].tolist(),
        "y": _short(np.add.reduceat(values, begins) / (ends - begins)),
        "n": len(values),
        "low": _short(np.minimum.reduceat(values, begins)),
        "high": _short(np.maximum.reduceat(values, begins)),
    }


def curves(rows: Rows, most: int = MOST_POINTS) -> tuple[list[list[float]], dict[str, dict[str, Any]]]:
    """All metrics of a run as curves; values that are not finite are left out.

    Returns:
        Step axes, and by metric its curve (:func:`thin`) with ``x`` the number of its axis: most share one.
    """
    names = sorted({name for row in rows for name in row} - {"step"})
    columns = {name: np.full(len(rows), np.nan) for name in names}
    for number, row in enumerate(rows):
        for name, value in row.items():
            if name != "step":
                columns[name][number] = value
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    axes: list[list[float]] = []
    numbers: dict[tuple[float, ...], int] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, values in columns.items():
        finite = np.isfinite(values)
        curve = thin(steps[finite], values[finite], most)
        axis = tuple(curve["x"])
        if axis not in numbers:
            numbers[axis] = len(axes)
            axes.append(list(axis))
        found[name] = {**curve, "x": numbers[axis]}
    return axes, found


def training_seconds(rows: Rows) -> tuple[list[float], list[float]]:
    """Steps, and the seconds that training had taken at the end of each, thinned alike: validation and saves count."""
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    spent = np.array([sum(row[name] for name in TIMED if math.isfinite(row.get(name, math.nan))) for row in rows])
    if not len(steps):
        return [], []
    seconds = np.cumsum(spent)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 2 * MOST_POINTS)).round().astype(np.int64))
    return steps[kept].tolist(), _short(seconds[kept])


def not_finite(rows: Rows) -> dict[str, int]:
    """By metric, at how many steps it was not a finite number; metrics that always were are left out."""
    counts: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if not math.isfinite(value):
                counts[name] = counts.get(name, 0) + 1
    return counts


def _short(values: np.ndarray) -> list[float]:
    """Six significant digits: more than a screen shows, and half the bytes."""
    return [float(f"{value:.6g}") for value in values.tolist()]
