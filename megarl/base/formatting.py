"""Formatting of text for people: counts, bytes, parameters and durations with their units, and aligned tables.

Tables on a terminal are rich's. The lines of :func:`table_lines` have no width limit, so that a long path or message
stays on one line and can be copied and searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB, GIB = 2**20, 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes per element of weights and activations."""
GAP = "  "


def count_noun(number: int, noun: str, grouping: bool = True) -> str:
    """Format a count with its noun: ``1 node``, ``1,024 nodes``.

    Args:
        noun: singular; the plural adds an ``s``.
    """
    digits = f"{number:,}" if grouping else str(number)
    return f"{digits} {noun}" if number == 1 else f"{digits} {noun}s"


def gib(nbytes: float) -> str:
    """Format bytes as a number of GiB, without the unit: one decimal, three for small sizes."""
    return f"{nbytes / GIB:,.1f}" if nbytes >= 0.05 * GIB else f"{nbytes / GIB:.3f}"


def gigabytes(nbytes: float) -> str:
    """Format bytes in decimal units: ``12.4 GB``, or ``3.1 MB`` below 100 MB."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def metric_count(number: float) -> str:
    """Format a large count, such as the parameters of a model: ``1.92 E``, ``2.27 B``, ``1.5 K``, ``12``."""
    units = ((1e18, " E"), (1e15, " P"), (1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K"))
    unit, name = next((unit for unit in units if number >= unit[0]), (1, ""))
    return f"{number / unit:.3g}{name}"


def rough(number: float) -> str:
    """Format an estimate with two significant digits: ``1,200``, ``12``, ``1.2``, ``0.012``."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 else f"{rounded:g}"


def duration(seconds: float) -> str:
    """Format seconds in words: ``8.3 s``, ``3 min 12 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def table_lines(rows: Iterable[Sequence[str]], align: str = "", indent: str = "", gap: str = GAP) -> list[str]:
    """Align the cells of each column; returns one line per row.

    Args:
        rows: cells; a row may be shorter than the others.
        align: one character per column, ``<`` left or ``>`` right; columns beyond its end are left-aligned.
    """
    cells = [list(row) for row in rows]
    columns = max(map(len, cells), default=0)
    widths = [max(len(row[column]) for row in cells if column < len(row)) for column in range(columns)]
    sides = align.ljust(columns, "<")
    lines = []
    for row in cells:
        padded = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False))
        lines.append((indent + gap.join(padded)).rstrip())
    return lines
