"""Metric names of docs/reference/metrics.md as patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def patterns() -> list[re.Pattern[str]]:
    """One pattern per name in the first column of a table; ``<x>`` matches anything, ``{a,b}`` either."""
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.M)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return [re.compile(_expression(name)) for name in names]


def _expression(name: str) -> str:
    parts = re.split(r"(<[^>]+>|\{[^}]+\})", name)
    return "".join(
        ".+" if part.startswith("<")
        else "(" + "|".join(map(re.escape, part[1:-1].split(","))) + ")" if part.startswith("{")
        else re.escape(part)
        for part in parts
    )  # fmt: skip


def undocumented(names: Iterable[str]) -> list[str]:
    """Metric names missing in the page, sorted."""
    documented = patterns()
    return sorted(name for name in set(names) - {"step"} if not any(pattern.fullmatch(name) for pattern in documented))
