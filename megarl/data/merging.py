"""Merging of the columns and facts of several batches, with a comparison of values of any type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megarl.base.errors import DataError


def require_same_keys(keys: Sequence[Any], kind: str) -> None:
    """Raise DataError for keys that some of the parts lack."""
    common, union = set(keys[0]).intersection(*keys[1:]), set().union(*keys)
    if common != union:
        raise DataError(f"some parts lack {kind} {sorted(union - common)}; add or drop them", code="batch.keys-differ")


def merge_mappings(parts: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Merge the entries of all parts.

    Raises:
        DataError: two parts have different values for a key.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged and not same_value(merged[key], value):
                raise DataError(f"{kind} {key!r} has two values; rename or drop one", code="batch.values-differ")
            merged[key] = value
    return merged


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal: tensors and arrays elementwise, with NaN equal to NaN."""
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
