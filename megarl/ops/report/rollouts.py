"""Samples for the report, read from ``<step>.jsonl`` files: an even selection that fits the page."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megarl.base.errors import DataError
from megarl.base.image_files import THUMBNAIL_SIDE, thumbnail
from megarl.base.json_text import parse_json
from megarl.ops.report.run_files import RunRecord
from megarl.tracking.sample_files import step_files
from megarl.tracking.token_columns import TOKEN_COLUMNS, TokenValues

MAX_TEXT = 12_000
MAX_ROWS = 6000
MOST_FILES = 600
MOST_THUMBNAILS = 500
FIELDS = (
    "run", "step", "kind", "input", "output", "gts", "score", "advantage", "source", "length", "masked", "tokens",
    "images", "later_images", "extra",
)  # fmt: skip
_STANDARD_FIELDS = {
    "input", "output", "gts", "score", "step", "masked", "tokens", "data_source", "response_length", "advantage",
    "images", "later_images", "thumbnails",
}  # fmt: skip
_MOST_EXTRA = 400
_DIGEST = re.compile("[0-9a-f]{1,16}")

Row = dict[str, Any]
Item = TypeVar("Item")


class ReportRollouts(NamedTuple):
    """Samples for the page: rows with :data:`FIELDS`, whose values are None if unavailable.

    ``run`` is the index of the run, ``masked`` has the character spans of tool output, ``tokens`` is encoded as in
    :mod:`megarl.tracking.token_columns`, ``images`` has the digests of the prompt's images, and
    ``later_images`` those of later turns.
    """

    rows: list[Row]
    total: int  # samples in the runs' files
    cut: int  # samples with a shortened text
    thumbnails: dict[str, str]  # WebP in base64 by digest, an even selection


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Cut the middle of a text longer than ``limit`` characters, and insert the number of removed characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{_gap(len(text) - 2 * half)}{text[-half:]}"


def _gap(characters: int) -> str:
    return f"\n[… {characters:,} characters left out …]\n"


def read_rollouts(runs: Sequence[RunRecord], budget: int, max_rows: int = MAX_ROWS) -> ReportRollouts:
    """Read samples of all runs and steps; if there are too many, the same number per step, evenly spaced.

    Incomplete lines of a killed process are skipped. The budget limits the compressed size, in bytes, roughly.
    Thumbnails take at most a quarter of it.
    """
    files: list[list[tuple[Row, int, bool]]] = []
    stored: dict[str, Any] = {}
    total = 0
    for number, run in enumerate(runs):
        for kind, folder in (("train", run.train_samples), ("validation", run.validation_samples)):
            paths = step_files(folder)
            chosen = set(select_evenly(paths, max(2, MOST_FILES // (2 * len(runs)))))
            for path in paths:
                if path in chosen:
                    entries = _entries(path)
                    for entry in entries:
                        stored |= thumbnails if isinstance(thumbnails := entry.get("thumbnails"), dict) else {}
                    files.append([_row(entry, int(path.stem), kind, number) for entry in entries])
                    total += len(entries)
                else:
                    total += path.read_bytes().count(b"\n")
    kept = _within(files, budget * 3 // 4 if stored else budget, max_rows)
    rows = [row for row, _, _ in kept]
    cut = sum(was_cut for _, _, was_cut in kept)
    return ReportRollouts(rows, total, cut, _thumbnails(rows, stored, budget // 4))


def _thumbnails(rows: Sequence[Row], stored: Mapping[str, Any], budget: int) -> dict[str, str]:
    """Encode thumbnails of the rows' images again, from their pixels: the files of a run may be hostile."""
    digests = dict.fromkeys(
        digest for row in rows for name in ("images", "later_images") for digest in row[name] or () if digest in stored
    )
    shown = dict[str, str]()
    for digest in select_evenly(list(digests), MOST_THUMBNAILS):
        with contextlib.suppress(DataError, ValueError, TypeError):
            data = base64.b64decode(stored[digest], validate=True)
            shown[digest] = base64.b64encode(thumbnail(data, digest, THUMBNAIL_SIDE**2)).decode("ascii")
    while sum(map(len, shown.values())) > budget:
        shown = {digest: shown[digest] for digest in select_evenly(list(shown), len(shown) * 4 // 5)}
    return shown


def _within(files: Sequence[Sequence[tuple[Row, int, bool]]], budget: int, max_rows: int) -> list[Any]:
    """Select as many rows per file as fit; if not even one, then of as many files as fit."""

    def chosen(count: int) -> list[tuple[Row, int, bool]]:
        return [row for rows in files for row in select_evenly(rows, count)]

    def fits(rows: Sequence[tuple[Row, int, bool]]) -> bool:
        return len(rows) <= max_rows and sum(size for _, size, _ in rows) <= budget

    low, high = 0, max(map(len, files), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(chosen(middle)) else (low, middle - 1)
    if low:
        return chosen(low)
    ones = chosen(1)
    count = len(ones)
    while count and not fits(select_evenly(ones, count)):
        count = count * 4 // 5
    return select_evenly(ones, count)


def select_evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Select at most ``count`` evenly spaced items, with the first and (from two on) the last."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _entries(path: Path) -> list[Mapping[str, Any]]:
    entries: list[Mapping[str, Any]] = []
    # not splitlines: it also splits at other characters that an answer may contain
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            entry = parse_json(line) if line.strip() else None
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _row(entry: Mapping[str, Any], step: int, kind: str, run: int) -> tuple[Row, int, bool]:
    """Build a row of the page; returns it with its compressed size in bytes and whether a text was cut."""
    score, gts, length = entry.get("score"), entry.get("gts", ""), entry.get("response_length")
    prompt, answer = str(entry.get("input", "")), str(entry.get("output", ""))
    output, masked, tokens = _answer(answer, entry.get("masked"), entry.get("tokens"))
    row = {
        "run": run,
        "step": step,
        "kind": kind,
        "input": shorten(prompt),
        "output": output,
        "gts": shorten(gts if isinstance(gts, str) else json.dumps(gts, ensure_ascii=False)),
        "score": _finite(score),
        "advantage": _finite(entry.get("advantage")),
        "source": str(entry.get("data_source", "")),
        "length": length if isinstance(length, int) else None,
        "masked": masked,
        "tokens": tokens,
        "images": _digests(entry.get("images")),
        "later_images": _digests(entry.get("later_images")),
        "extra": {
            name: shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), _MOST_EXTRA)
            for name, value in entry.items()
            if name not in _STANDARD_FIELDS
        },
    }
    size = len(zlib.compress(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"), 1)) * 4 // 3
    return row, size, len(answer) > MAX_TEXT or len(prompt) > MAX_TEXT


def _digests(value: Any) -> list[str] | None:
    digests = value if isinstance(value, list) else []
    return [text if isinstance(text, str) and _DIGEST.fullmatch(text) else "" for text in digests] or None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _answer(text: str, masked: Any, coded: Any) -> tuple[str, list[list[int]] | None, dict[str, str] | None]:
    """Cut an answer to the limit at token boundaries, with its masked spans and token values."""
    spans = _spans(masked, len(text))
    tokens = TokenValues.decode(coded, len(text)) if isinstance(coded, Mapping) else None
    if len(text) <= MAX_TEXT:
        return text, spans, tokens.encoded() if tokens else None
    begin, end = MAX_TEXT // 2, len(text) - MAX_TEXT // 2
    if tokens is not None:
        ends = np.cumsum(tokens.characters)
        first, last = int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(ends, end, "left")) + 1
        begin, end = int(ends[first - 1]) if first else 0, int(ends[last - 1])
        gap = _gap(end - begin)
        tokens = tokens.part(0, first).joined(tokens.part(last, len(ends)), len(gap))
    else:
        gap = _gap(end - begin)
    shift = begin + len(gap) - end
    if spans is not None:
        cut = [[[a, min(b, begin)] for a, b in spans if a < begin], [[max(a, end), b] for a, b in spans if b > end]]
        spans = [*cut[0], *([a + shift, b + shift] for a, b in cut[1])]
    return text[:begin] + gap + text[end:], spans, tokens.encoded() if tokens else None


def _spans(masked: Any, length: int) -> list[list[int]] | None:
    """Return the masked spans; None unless they ascend within the text."""
    if not masked or not isinstance(masked, list):
        return None
    try:
        spans = [[int(begin), int(end)] for begin, end in masked]
    except (TypeError, ValueError):
        return None
    borders = [0, *(border for span in spans for border in span), length]
    return spans if all(a <= b for a, b in pairwise(borders)) else None


def rollout_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as one list per field, the format of the page's script."""
    return {field: [row[field] for row in rows] for field in FIELDS}


def token_columns(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the present token columns, with the colour range: all but the extreme two percent on each side."""
    values: dict[str, list[np.ndarray[Any, Any]]] = {}
    for row in rows:
        tokens = TokenValues.decode(row["tokens"], len(row["output"])) if row["tokens"] else None
        for name, numbers in tokens.columns.items() if tokens else ():
            values.setdefault(name, []).append(numbers[np.isfinite(numbers)])
    described = []
    for column in TOKEN_COLUMNS:
        if column.name in values:
            numbers = np.concatenate(values[column.name])
            low, high = np.quantile(numbers, (0.02, 0.98)).tolist() if len(numbers) else (0.0, 0.0)
            described.append({**column._asdict(), "low": float(f"{low:.3g}"), "high": float(f"{high:.3g}")})
    return described
