"""Which rows go through the model together.

A micro-batch is computed packed, so what bounds it is its number of tokens, not its longest row times its rows. The
plan never changes a result: losses are normalised by counts over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.errors import DataError


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int | None = None, size: int | None = None
) -> list[list[int]]:
    """Cut rows into micro-batches, each row into exactly one.

    With ``max_tokens`` the rows are packed first-fit decreasing: longest row first, into the first micro-batch with
    room. That needs at most 11/9 of the fewest possible micro-batches, plus 6/9 (Dosa 2007). With ``size``, consecutive
    rows are taken. Both depend on nothing but the arguments.

    Args:
        lengths: tokens of each row, prompt and response.
        max_tokens: tokens a micro-batch may hold.
        size: rows a micro-batch may hold.

    Returns:
        Row numbers of each micro-batch, ascending; with ``max_tokens`` the one with the longest row comes first.

    Raises:
        DataError: not exactly one of the two limits is given, a limit is below 1, or a row is above ``max_tokens``.
    """
    if (max_tokens is None) == (size is None):
        raise DataError(f"give either max_tokens or size, got max_tokens={max_tokens} and size={size}")
    if size is not None:
        if size < 1:
            raise DataError(f"size must be at least 1 row, got {size}")
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    assert max_tokens is not None  # one of the two is given
    _check_budget(lengths, max_tokens)
    return _first_fit_decreasing(lengths, max_tokens)


def _check_budget(lengths: Sequence[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise DataError(f"max_tokens must be at least 1, got {max_tokens}")
    for row, length in enumerate(lengths):
        if not 0 <= length <= max_tokens:
            raise DataError(
                f"row {row} has {length} tokens, a micro-batch may hold {max_tokens}; raise the token budget per "
                "device (*max_token_len_per_gpu) to at least the longest prompt plus response"
            )


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    room = np.full(len(lengths), max_tokens, dtype=np.int64)  # of every micro-batch that may be opened
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        group = int(np.argmax(room >= lengths[row]))
        if group == len(groups):
            groups.append([])
        groups[group].append(row)
        room[group] -= lengths[row]
    return [sorted(group) for group in groups]
