"""Load of each data-parallel rank, as maps of ranks over steps, downsampled for the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from megarl.tracking.jsonl_files import SECONDS_SUFFIX, TOKENS, WORK, BalanceRows

MOST_STEPS, MOST_RANKS = 200, 128
_BUSY = "Seconds in the verb, without collectives, of the busiest process of a rank."
_NOTES = {
    TOKENS: ("tokens", "Assigned tokens of the update."),
    WORK: ("predicted work", "Of the update, by the model's FLOPs."),
}


def balance_maps(rows: BalanceRows) -> dict[str, dict[str, Any]]:
    """Return the load map of each list in the balance file; lists of a single rank are skipped.

    Returns:
        By list: ``steps`` ``[s]``; ``ranks`` ``[r]``, first rank of each row; ``each``, ranks per row; ``mean`` ``[s]``
        over the ranks; ``load`` ``[r][s]``, relative to the mean. With more than :data:`MOST_STEPS` steps, each
        interval keeps the step whose busiest rank had the highest load. With more than :data:`MOST_RANKS` ranks, a row
        keeps the busiest of neighbouring ranks.
    """

    def order(name: str) -> tuple[str, int, str]:
        """Sort by role, then assigned quantities before measured ones."""
        role, _, quantity = name.partition("/")
        return role, {TOKENS: 0, WORK: 1}.get(quantity, 2), quantity

    names = sorted({name for lists in rows.values() for name in lists}, key=order)
    maps = {}
    for name in names:
        # After a resume with another layout, ranks differ: only steps of the last layout are shown.
        width = next(len(lists[name]) for lists in reversed(list(rows.values())) if name in lists)
        steps = [step for step, lists in rows.items() if len(lists.get(name, ())) == width]
        if width > 1:
            maps[name] = _map(steps, np.array([rows[step][name] for step in steps], dtype=np.float64))
    return maps


def balance_charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return a chart for each map, in the format of :func:`~megarl.ops.report.charts.chart_groups`."""
    charts = []
    for name in names:
        role, _, quantity = name.partition("/")
        label, note = _NOTES.get(quantity, (f"busy in {quantity.removesuffix(SECONDS_SUFFIX)}", _BUSY))
        note += " Colour: relative to the mean of the step's ranks."
        series = [{"metric": name, "label": label}]
        title = f"Ranks of {role}: {label}"
        charts.append({"title": title, "note": note, "kind": "ranks", "wide": False, "series": series})
    return charts


def _map(steps: list[int], values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Build one map; ``values`` has shape ``[s, r]``."""
    mean = values.mean(axis=1)
    load = np.divide(values, mean[:, None], out=np.ones_like(values), where=mean[:, None] > 0)
    intervals = np.array_split(np.arange(len(steps)), min(len(steps), MOST_STEPS))
    kept = np.array([interval[load[interval].max(axis=1).argmax()] for interval in intervals])
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
