"""Putting batches together: rows below rows at differing widths, and columns beside columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megarl.data.columns import COLUMNS, Widths, column_widths
from megarl.data.sequences import read_spans
from megarl.data.wire import padding_value
from megarl.errors import DataError


def join_rows(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of several batches below each other; declared columns are padded to the widest.

    Raises:
        DataError: the parts have different columns, or an undeclared column differs in shape or dtype.
    """
    require_same_keys([part.keys() for part in parts], "tensor columns")
    widths = [column_widths(part) for part in parts]
    prompt = max((w.prompt or 0 for w in widths), default=0)
    response = max((w.response or 0 for w in widths), default=0)
    if any(own not in (Widths(prompt, response), Widths(None, None)) for own in widths):
        pads = _paddings(parts)
        parts = [_widen(part, own, prompt, response, pads) for part, own in zip(parts, widths, strict=True)]
    return {name: _stack(name, [part[name] for part in parts]) for name in parts[0]}


def _paddings(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """What to pad each declared column with: what the parts pad it with already, so that it never mixes two values."""
    pads: dict[str, float] = {}
    for part in parts:
        spans = read_spans(part)
        for name in part.keys() & COLUMNS.keys() - pads.keys():
            column = COLUMNS[name]
            if spans is None or column.alignment == "row":
                continue
            pad = padding_value(part[name], spans.mask(column.alignment), column)
            if pad is not None:
                pads[name] = pad
    return pads


def _widen(
    part: Mapping[str, Tensor], own: Widths, prompt: int, response: int, pads: Mapping[str, float]
) -> dict[str, Tensor]:
    """The part with its declared columns padded to ``prompt`` and ``response`` wide."""
    left = prompt - own.prompt if own.prompt is not None else 0
    right = response - own.response if own.response is not None else 0
    result = {}
    for name, tensor in part.items():
        column = COLUMNS.get(name)
        if column is None or column.alignment == "row":
            result[name] = tensor
            continue
        before = left if column.alignment in ("prompt", "sequence") else 0
        after = right if column.alignment in ("response", "sequence") else 0
        result[name] = functional.pad(
            tensor, (0, 0) * (tensor.dim() - 2) + (before, after), value=pads.get(name, column.pad)
        )
    return result


def _stack(name: str, tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise DataError(
                f"column {name!r} cannot be joined: {list(first.shape)} {first.dtype} and "
                f"{list(tensor.shape)} {tensor.dtype}; only the columns of megarl.data.COLUMNS may differ in width"
            )
    return torch.cat(tensors)


def require_same_keys(keys: Sequence[Any], what: str) -> None:
    """Raise DataError naming the keys that some of the parts lack."""
    everywhere, anywhere = set(keys[0]).intersection(*keys[1:]), set().union(*keys)
    if everywhere != anywhere:
        raise DataError(f"{what} {sorted(anywhere - everywhere)} are in some parts and not in others; add or drop them")


def merge_mappings(parts: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """All entries of the parts.

    Raises:
        DataError: two parts have one key with different values.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged and not same_value(merged[key], value):
                raise DataError(f"{what} {key!r} has two different values; rename or drop one of them")
            merged[key] = value
    return merged


def same_value(first: Any, second: Any) -> bool:
    """Whether two values are equal: tensors and arrays element by element, NaN equal to NaN."""
    if first is second:
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return bool(((first == second) | ((first != first) & (second != second))).all())
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and all(map(same_value, first.flat, second.flat))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, float) and isinstance(second, float) and first != first and second != second:
        return True
    return type(first) is type(second) and bool(first == second)
