"""Compares two checkpoints tensor by tensor, whatever their formats, band by band."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.convert.output import Band, bands_of
from megarl.convert.progress import progress
from megarl.convert.source import SCORE, Source
from megarl.convert.stored import Files, Scratch
from megarl.convert.transfer import in_parallel


@dataclass
class Difference:
    """How a tensor of B differs from that of A."""

    largest: float = 0.0
    """Largest absolute difference; infinite or NaN where one side is and the other is not."""
    elements: int = 0
    """How many elements differ in value."""


@dataclass
class Comparison:
    """All in which B differs from A."""

    compared: int = 0
    missing: list[str] = field(default_factory=list)
    """In A only."""
    unexpected: list[str] = field(default_factory=list)
    """In B only."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    """Number formats that differ; that alone is told, but is no difference."""
    different: dict[str, Difference] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors with the same values."""
        return not (self.missing or self.unexpected or self.shapes or self.different)


def compare(first: Source, second: Source, workers: int) -> Comparison:
    """Compares every tensor of two checkpoints, element by element in float64.

    A NaN equals a NaN. A bias of a scalar head that is zero equals one that is absent.

    Args:
        first: A.
        second: B.
        workers: number of threads.

    Raises:
        CheckpointError: something of either is missing or damaged.
    """
    result = Comparison()
    common = []
    for name, view in first.tensors.items():
        other = second.tensors.get(name)
        if other is None:
            result.missing.append(name)
        elif view.shape != other.shape:
            result.shapes[name] = (view.shape, other.shape)
        else:
            common.append(name)
            if view.dtype != other.dtype:
                result.dtypes[name] = (view.dtype, other.dtype)
    result.unexpected = [name for name in second.tensors if name not in first.tensors]
    _forget_zero_bias(first, result.missing)
    _forget_zero_bias(second, result.unexpected)
    result.compared = len(common)
    _compare_values(first, second, common, result, workers)
    return result


def _compare_values(first: Source, second: Source, names: list[str], result: Comparison, workers: int) -> None:
    files, lock = Files(), threading.Lock()

    def check(band: Band, scratch: Scratch) -> None:
        name = band.view.name
        other = second.tensors[name]
        a = band.view.read(band.first, band.last, band.view.dtype, files, scratch).flatten()
        kept = scratch.tensor("other", (a.numel(),), a.dtype).copy_(a)
        b = other.read(band.first, band.last, other.dtype, files, scratch).flatten()
        count, largest = _differing(kept, b)
        if count:
            with lock:
                found = result.different.setdefault(name, Difference())
                found.elements += count
                if not found.largest >= largest and not math.isnan(found.largest):
                    found.largest = largest
        report(band.nbytes)

    bands = (band for name in names for band in bands_of(first.tensors[name], torch.float64))
    total = sum(math.prod(first.tensors[name].shape) * 8 for name in names)
    try:
        with progress("comparing", total) as report:
            in_parallel(check, bands, workers)
    finally:
        files.close()
    order = {name: n for n, name in enumerate(names)}
    result.different = dict(sorted(result.different.items(), key=lambda item: order[item[0]]))


def _differing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """How many elements differ, and by how much at most."""
    if a.dtype == b.dtype and torch.equal(a, b):
        return 0, 0.0
    left, right = a.double(), b.double()
    unequal = (left != right) & ~(left.isnan() & right.isnan())
    count = int(unequal.sum())
    return count, float((left - right)[unequal].abs().max()) if count else 0.0


def _forget_zero_bias(source: Source, names: list[str]) -> None:
    if SCORE[1] in names:
        view, files = source.tensors[SCORE[1]], Files()
        try:
            if not view.read(0, view.shape[0], view.dtype, files, Scratch()).any():
                names.remove(SCORE[1])
        finally:
            files.close()


def describe(comparison: Comparison, first: Path, second: Path, limit: int = 20) -> str:
    """The comparison in lines for people, at most ``limit`` tensors of each kind."""
    lines: list[str] = []

    def section(title: str, entries: list[str]) -> None:
        if entries:
            lines.append(f"{title}: {len(entries)}")
            lines.extend(f"  {entry}" for entry in entries[:limit])
            if len(entries) > limit:
                lines.append(f"  and {len(entries) - limit} more")

    section(f"missing in {second}", comparison.missing)
    section(f"unexpected in {second}", comparison.unexpected)
    section("of another shape", [f"{n}: {list(a)} and {list(b)}" for n, (a, b) in comparison.shapes.items()])
    section(
        "different",
        [f"{n}: {d.elements} elements, by at most {d.largest:.6g}" for n, d in comparison.different.items()],
    )
    if comparison.dtypes:
        pairs = sorted({f"{_short(a)} and {_short(b)}" for a, b in comparison.dtypes.values()})
        lines.append(f"number formats differ in {len(comparison.dtypes)} tensors ({', '.join(pairs)}); values compared")
    if comparison.different:
        name, worst = max(comparison.different.items(), key=lambda item: (math.isnan(item[1].largest), item[1].largest))
        lines.append(f"largest difference: {worst.largest:.6g} in {name}")
    verdict = "equal" if comparison.equal else "NOT equal"
    lines.append(f"{first} and {second} are {verdict}: {comparison.compared} tensors compared")
    return "\n".join(lines)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
