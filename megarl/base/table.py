"""Text tables: rows of cells as aligned lines, for logs, files and pipes.

Tables on a terminal are rich's. These lines have no width limit, so that a long path or message stays on one line and
can be copied and searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GAP = "  "


def table_lines(rows: Iterable[Sequence[str]], align: str = "", indent: str = "", gap: str = GAP) -> list[str]:
    """Align the cells of each column; returns one line per row.

    Args:
        rows: cells; a row may be shorter than the others.
        align: one character per column, ``<`` left or ``>`` right; columns beyond its end are left-aligned.
        indent: start of each line.
        gap: text between two columns.
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
