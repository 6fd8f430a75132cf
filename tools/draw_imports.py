"""Draw the import graph of the package's rooms: ``python tools/draw_imports.py > docs/images/imports.svg``.

Floors are those of the layers contract in ``pyproject.toml``. An arrow is at least one import, found by grimp, which
import-linter also uses. Rooms that every floor may use, and single files outside the layers, are not drawn.
"""

from __future__ import annotations

import sys
import tomllib
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megarl"
COLOURS = ("#3b6fb6", "#2a9d8f", "#d98324", "#b5446e", "#6a5acd", "#5f7f2f", "#9a5b2f", "#3f8fae", "#777777")
WIDTH, FLOOR, BOX, TOP, SIDE, GAP = 1120, 118, 34, 30, 16, 12
FONT = "font-family='system-ui, sans-serif' font-size='13'"
EVERYWHERE = "base"


def floors() -> list[list[str]]:
    """Return the names of the rooms, from the top floor down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract["name"] == "Imports point down only")
    rows = [[name.strip().removeprefix(f"{PACKAGE}.") for name in layer.split("|")] for layer in layers]
    return [row for row in rows if row != [EVERYWHERE]]


def arrows(rooms: list[str]) -> list[tuple[str, str]]:
    """Return pairs of importing and imported rooms, sorted."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)

    pairs = (
        (module.split(".")[1:2], imported.split(".")[1:2])
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )
    return sorted({(a[0], b[0]) for a, b in pairs if a and b and a != b and {a[0], b[0]} <= set(rooms)})


def draw() -> str:
    """Return the picture as SVG."""
    rows = floors()
    boxes = {name: box for number, row in enumerate(rows) for name, box in _row_boxes(row, TOP + number * FLOOR)}
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(boxes)}
    height = TOP + (len(rows) - 1) * FLOOR + BOX + TOP
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {FONT}>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        *(_draw_arrow(boxes, colours, *pair) for pair in arrows(list(boxes))),
        *(_draw_box(name, box, colours[name]) for name, box in boxes.items()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _row_boxes(names: list[str], top: int) -> list[tuple[str, tuple[float, float, float]]]:
    """Return left edge, top and width of each box of a floor."""
    width = min(150.0, (WIDTH - 2 * SIDE - GAP * (len(names) - 1)) / len(names))
    left = (WIDTH - width * len(names) - GAP * (len(names) - 1)) / 2
    return [(name, (left + number * (width + GAP), top, width)) for number, name in enumerate(names)]


def _draw_box(name: str, box: tuple[float, float, float], colour: str) -> str:
    left, top, width = box
    return (
        f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='{BOX}' rx='6' fill='#ffffff' stroke='{colour}' "
        f"stroke-width='2'/><text x='{left + width / 2:.1f}' y='{top + BOX / 2 + 4.5}' text-anchor='middle' "
        f"fill='#222222'>{escape(name)}</text>"
    )


def _draw_arrow(boxes: dict[str, tuple[float, float, float]], colours: dict[str, str], source: str, target: str) -> str:
    """Draw a curve from the lower edge of one box to the upper edge of another, or below both on the same floor."""
    (left, top, width), (to_left, to_top, to_width) = boxes[source], boxes[target]
    start, end = (left + width / 2, top + BOX), (to_left + to_width / 2, to_top)
    middle = (start[1] + end[1]) / 2
    if top == to_top:
        end = (end[0], end[1] + BOX)
        middle = top + BOX + 30
    points = f"{start[0]:.1f} {middle:.1f} {end[0]:.1f} {middle:.1f} {end[0]:.1f} {end[1]:.1f}"
    return (
        f"<path d='M{start[0]:.1f} {start[1]:.1f} C{points}' fill='none' stroke='{colours[source]}' "
        f"stroke-opacity='0.55' stroke-width='1.5'><title>{escape(source)} imports {escape(target)}</title></path>"
    )


if __name__ == "__main__":
    assert all(len(set(a) & set(b)) == 0 for a, b in pairwise(floors())), "a room is on two floors"
    sys.stdout.write(draw())
