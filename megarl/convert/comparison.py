"""Comparison of two checkpoints, tensor by tensor and band by band, independent of their formats."""

from __future__ import annotations

import math
import threading
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megarl.convert.output import Band, bands_of, in_parallel, progress
from megarl.convert.source import SCORE, CheckpointSource
from megarl.convert.stored import Files, Scratch


@dataclass
class TensorDifference:
    """Difference between a tensor of A and of B."""

    largest: float = 0.0  # largest absolute difference; infinite or NaN if only one side is
    elements: int = 0  # number of elements with different values


@dataclass
class Comparison:
    """All differences between two checkpoints A and B."""

    compared: int = 0
    missing: list[str] = field(default_factory=list)  # tensors in A only
    unexpected: list[str] = field(default_factory=list)  # tensors in B only
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)  # no difference, but reported
    different: dict[str, TensorDifference] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors with the same values."""
        return not (self.missing or self.unexpected or self.shapes or self.different)


def compare(first: CheckpointSource, second: CheckpointSource, workers: int) -> Comparison:
    """Compare every tensor of two checkpoints, vision towers included, element by element in float64.

    NaN equals NaN. A zero bias of a scalar head equals a missing one.

    Raises:
        CheckpointError: a file of either checkpoint is missing or damaged.
    """
    first, second = (replace(source, tensors={**source.tensors, **source.tower}) for source in (first, second))
    result = Comparison()
    common = []
    for name, view in first.tensors.items():
        counterpart = second.tensors.get(name)
        if counterpart is None:
            result.missing.append(name)
        elif view.shape != counterpart.shape:
            result.shapes[name] = (view.shape, counterpart.shape)
        else:
            common.append(name)
            if view.dtype != counterpart.dtype:
                result.dtypes[name] = (view.dtype, counterpart.dtype)
    result.unexpected = [name for name in second.tensors if name not in first.tensors]
    _forget_zero_bias(first, result.missing)
    _forget_zero_bias(second, result.unexpected)
    result.compared = len(common)
    _compare_values(first, second, common, result, workers)
    return result


def _compare_values(
    first: CheckpointSource, second: CheckpointSource, names: list[str], result: Comparison, workers: int
) -> None:
    files, lock = Files(), threading.Lock()

    def check(band: Band, scratch: Scratch) -> None:
        name = band.view.name
        counterpart = second.tensors[name]
        a = band.view.read(band.first, band.last, band.view.dtype, files, scratch).flatten()
        copied = scratch.tensor("other", (a.numel(),), a.dtype).copy_(a)
        b = counterpart.read(band.first, band.last, counterpart.dtype, files, scratch).flatten()
        count, largest = _differing(copied, b)
        if count:
            with lock:
                difference = result.different.setdefault(name, TensorDifference())
                difference.elements += count
                if not difference.largest >= largest and not math.isnan(difference.largest):
                    difference.largest = largest
        report(band.nbytes)

    bands = (band for name in names for band in bands_of(first.tensors[name], torch.float64))
    total = sum(math.prod(first.tensors[name].shape) * 8 for name in names)
    with closing(files), progress("comparing", total) as report:
        in_parallel(check, bands, workers)
    order = {name: n for n, name in enumerate(names)}
    result.different = dict(sorted(result.different.items(), key=lambda item: order[item[0]]))


def _differing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return the number of different elements and the largest difference."""
    if a.dtype == b.dtype and torch.equal(a, b):
        return 0, 0.0
    left, right = a.double(), b.double()
    unequal = (left != right) & ~(left.isnan() & right.isnan())
    count = int(unequal.sum())
    return count, float((left - right)[unequal].abs().max()) if count else 0.0


def _forget_zero_bias(source: CheckpointSource, names: list[str]) -> None:
    if SCORE[1] in names:
        view = source.tensors[SCORE[1]]
        with closing(Files()) as files:
            if not view.read(0, view.shape[0], view.dtype, files, Scratch()).any():
                names.remove(SCORE[1])


def describe(comparison: Comparison, first: Path, second: Path, limit: int = 20) -> str:
    """Describe the comparison in lines, with at most ``limit`` tensors of each kind."""
    lines: list[str] = []

    def section(title: str, entries: list[str]) -> None:
        if entries:
            lines.append(f"{title}: {len(entries)}")
            lines.extend(f"  {entry}" for entry in entries[:limit])
            if len(entries) > limit:
                lines.append(f"  and {len(entries) - limit} more")

    section(f"missing in {second}", comparison.missing)
    section(f"unexpected in {second}", comparison.unexpected)
    section("different shapes", [f"{n}: {list(a)} and {list(b)}" for n, (a, b) in comparison.shapes.items()])
    section(
        "different",
        [f"{n}: {d.elements} elements, by at most {d.largest:.6g}" for n, d in comparison.different.items()],
    )
    if comparison.dtypes:
        pairs = sorted({f"{a} and {b}".replace("torch.", "") for a, b in comparison.dtypes.values()})
        lines.append(f"dtypes differ in {len(comparison.dtypes)} tensors ({', '.join(pairs)}); values compared")
    if comparison.different:
        name, worst = max(comparison.different.items(), key=lambda item: (math.isnan(item[1].largest), item[1].largest))
        lines.append(f"largest difference: {worst.largest:.6g} in {name}")
    verdict = "equal" if comparison.equal else "NOT equal"
    lines.append(f"{first} and {second} are {verdict}: {comparison.compared} tensors compared")
    return "\n".join(lines)
