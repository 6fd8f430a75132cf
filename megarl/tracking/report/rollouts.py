"""Rollouts for the report, out of the dumps ``<step>.jsonl`` with ``input, output, gts, score, step``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

MAX_TEXT = 6000
FIELDS = ("step", "kind", "input", "output", "gts", "score", "parts")


class RolloutSample(NamedTuple):
    """Rollouts to show.

    Attributes:
        rows: the rollouts, each with ``step, kind, input, output, gts, score``, and ``parts``: the output as pairs of a
            text and whether it is masked, None where nothing is.
        total: how many there were before some were left out.
    """

    rows: list[dict[str, Any]]
    total: int


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """The text, with its middle taken out where it is longer than ``limit`` characters, and how much that was."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def _row(entry: Mapping[str, Any], step: int, kind: str) -> dict[str, Any]:
    score, gts = entry.get("score"), entry.get("gts", "")
    return {
        "step": step,
        "kind": kind,
        "input": shorten(str(entry.get("input", ""))),
        "output": shorten(str(entry.get("output", ""))),
        "gts": shorten(gts if isinstance(gts, str) else json.dumps(gts, ensure_ascii=False)),
        "score": float(score) if isinstance(score, int | float) and math.isfinite(score) else None,
        "parts": _parts(str(entry.get("output", "")), entry.get("masked")),
    }


def _parts(output: str, masked: Any) -> list[tuple[str, bool]] | None:
    """The output cut at the borders of what tools and searches wrote; None where it is one piece, or too long."""
    if not masked or len(output) > MAX_TEXT:
        return None
    borders = [0, *(border for span in masked for border in span), len(output)]
    pieces = [output[begin:end] for begin, end in pairwise(borders)]
    return [(piece, bool(number % 2)) for number, piece in enumerate(pieces) if piece]


def _spread(rows: Sequence[Any], count: int) -> list[Any]:
    if len(rows) <= count:
        return list(rows)
    return [rows[len(rows) * index // count] for index in range(count)]


def _files(folder: Path | None) -> list[Path]:
    found = folder.glob("*.jsonl") if folder is not None and folder.is_dir() else ()
    return sorted((path for path in found if path.stem.isdigit()), key=lambda path: int(path.stem))


def read_rollouts(train: Path | None, validation: Path | None = None, max_rows: int = 6000) -> RolloutSample:
    """Rollouts of all steps; where there are too many, evenly spread ones of each step.

    A line that a killed process left half written is left out.

    Args:
        train: folder of the training dumps, None or missing where there are none.
        validation: folder of the validation dumps, likewise.
        max_rows: about how many to keep.
    """
    files = [("train", path) for path in _files(train)] + [("validation", path) for path in _files(validation)]
    rows: list[dict[str, Any]] = []
    total = 0
    for kind, path in files:
        # not splitlines: an answer may hold characters that it takes for the end of a line
        lines = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
        entries = []
        for line in lines:
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        total += len(entries)
        rows += [_row(entry, int(path.stem), kind) for entry in _spread(entries, max(1, max_rows // len(files)))]
    return RolloutSample(rows, total)


def rollout_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as one list per field, as the page's script wants them."""
    return {field: [row[field] for row in rows] for field in FIELDS}
