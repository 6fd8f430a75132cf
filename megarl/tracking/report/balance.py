"""What each data-parallel rank had to do, as maps of ranks over steps that a page can hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from megarl.tracking.balance_file import SECONDS_SUFFIX, TOKENS, WORK, BalanceRows

MOST_STEPS, MOST_RANKS = 200, 128
_BUSY = "Seconds in the verb, less those in collectives, of the busiest process of a rank."
_NOTES = {
    TOKENS: ("tokens", "Of its update, as dealt out."),
    WORK: ("predicted work", "Of its update, by the model's FLOPs."),
}


def balance_maps(rows: BalanceRows) -> dict[str, dict[str, Any]]:
    """By list of the balance file, its map; none of what has one rank only.

    Returns:
        ``steps`` ``[s]``; ``ranks`` ``[r]``, the number of a row's first rank; ``each``, ranks of a row; ``mean``
        ``[s]``, over the ranks; ``load`` ``[r][s]``, over that mean. Of more steps than :data:`MOST_STEPS` those are
        kept in which, of their stretch, the busiest rank had most; of more ranks than :data:`MOST_RANKS` the busiest of
        neighbours.
    """
    names = sorted({name for lists in rows.values() for name in lists}, key=_order)
    maps = {}
    for name in names:
        # A run that continues with another layout begins a map of its own: ranks are not the same ones.
        width = next(len(lists[name]) for lists in reversed(list(rows.values())) if name in lists)
        steps = [step for step, lists in rows.items() if len(lists.get(name, ())) == width]
        if width > 1:
            maps[name] = _map(steps, np.array([rows[step][name] for step in steps], dtype=np.float64))
    return maps


def balance_charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """A chart for each map, as :func:`~megarl.tracking.report.charts.chart_groups` has charts."""
    charts = []
    for name in names:
        role, _, quantity = name.partition("/")
        what, note = _NOTES.get(quantity, (f"busy in {quantity.removesuffix(SECONDS_SUFFIX)}", _BUSY))
        note += " Colour: over the mean of the step's ranks."
        series = [{"metric": name, "label": what}]
        title = f"Ranks of {role}: {what}"
        charts.append({"title": title, "note": note, "kind": "ranks", "wide": False, "series": series})
    return charts


def _map(steps: list[int], values: np.ndarray) -> dict[str, Any]:
    """``values`` ``[s, r]``."""
    mean = values.mean(axis=1)
    load = np.divide(values, mean[:, None], out=np.ones_like(values), where=mean[:, None] > 0)
    kept = np.array([part[load[part].max(axis=1).argmax()] for part in _parts(len(steps), MOST_STEPS)])
    each = -(-values.shape[1] // MOST_RANKS)
    first = np.arange(0, values.shape[1], each)
    busiest = np.maximum.reduceat(load[kept], first, axis=1)
    return {
        "steps": [steps[at] for at in kept],
        "ranks": first.tolist(),
        "each": each,
        "mean": [float(f"{value:.4g}") for value in mean[kept].tolist()],
        "load": [[round(value, 4) for value in row] for row in busiest.T.tolist()],
    }


def _parts(count: int, most: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), min(count, most))


def _order(name: str) -> tuple[str, int, str]:
    """Roles by name; what was dealt out before what was measured."""
    role, _, quantity = name.partition("/")
    return role, {TOKENS: 0, WORK: 1}.get(quantity, 2), quantity
