"""Micro-batch planning (dynamic batching): cut rows into packed micro-batches under a token budget.

A micro-batch is computed packed, so its memory depends on its number of tokens, not on its longest row. The plan never
changes a result: losses are normalised by counts over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megarl.base.errors import DataError
from megarl.data.balance import Capacity, Parts, local_search


def fewest_micro_batches(lengths: Sequence[int], *, max_tokens: int | None = None, size: int | None = None) -> int:
    """Count the micro-batches of :func:`plan_micro_batches` without a given count; same arguments and errors."""
    return len(_fewest(lengths, max_tokens, size))


def common_micro_batch_count(counts: Sequence[int], multiple: int) -> int:
    """Find the smallest number of micro-batches that all data-parallel ranks can use, from each rank's minimum.

    Ranks must agree if the forward pass of a micro-batch contains a collective of all ranks (expert parallelism). The
    interleaved pipeline schedule needs a ``multiple`` of the number of stages.
    """
    return -(-max(counts) // multiple) * multiple


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    size: int | None = None,
    count: int | None = None,
    costs: Sequence[float] | None = None,
) -> list[list[int]]:
    """Cut rows into non-empty micro-batches; each row is in exactly one.

    With ``max_tokens``, first-fit decreasing bin packing (longest row first, into the first micro-batch with capacity)
    determines their number: at most 11/9 of the minimum, plus 6/9 (Dosa 2007). The rows are then distributed over that
    number, or over ``count``, with similar costs, because pipeline stages, and data-parallel ranks that synchronise in
    every micro-batch, wait for the most expensive one. With ``size``, micro-batches are consecutive rows. The plan is a
    function of the arguments alone.

    Args:
        lengths: tokens of each row, prompt and response.
        max_tokens: token budget of a micro-batch.
        size: row limit of a micro-batch.
        count: number of micro-batches, at least the required number; None = the required number.
        costs: work per row, with ``max_tokens``; its tokens if None.

    Returns:
        Row numbers of each micro-batch, ascending; with ``max_tokens`` the micro-batch with the most tokens, which
        needs the most memory, comes first.

    Raises:
        DataError: not exactly one of the two limits is set, a limit is below 1, a row exceeds ``max_tokens``, or
            ``count`` is below the required number or above the number of rows.
    """
    groups = _fewest(lengths, max_tokens, size)
    count = len(groups) if count is None else count
    if not len(groups) <= count <= len(lengths):
        raise DataError(
            f"{len(lengths)} rows that need {len(groups)} micro-batches cannot be cut into {count}; give each "
            "data-parallel rank more rows, or a larger budget per micro-batch",
            code="batch.micro-batch-count",
        )
    if max_tokens is None:
        return (
            groups if count == len(groups) else [part.tolist() for part in np.array_split(range(len(lengths)), count)]
        )
    tokens = np.asarray(lengths, dtype=np.int64)
    work = tokens.astype(np.float64) if costs is None else np.asarray(costs, dtype=np.float64)
    start = _greedy_with_capacity(work, tokens, count, max_tokens) or _split_groups(groups, work, count)
    balanced = local_search(work, start, fixed_sizes=False, capacity=Capacity(tokens, max_tokens))
    by_tokens = sorted(balanced, key=lambda group: (-int(tokens[group].sum()), int(group.min())))
    return [sorted(group.tolist()) for group in by_tokens]


def check_longest(lengths: Sequence[int], max_tokens: int, name: Callable[[int], str] = "row {}".format) -> None:
    """Check that every row fits into a micro-batch.

    Args:
        name: formats a row number for the message.

    Raises:
        DataError: a row has more tokens; names the row and the remedy.
    """
    for row, length in enumerate(lengths):
        if not 0 <= length <= max_tokens:
            raise DataError(
                f"{name(row)} has {length} tokens, a micro-batch may hold {max_tokens}; raise the token budget per "
                "device (*max_token_len_per_gpu) to at least the longest prompt plus response",
                code="batch.micro-batch-tokens",
            )


def _fewest(lengths: Sequence[int], max_tokens: int | None, size: int | None) -> list[list[int]]:
    if (max_tokens is None) == (size is None):
        raise DataError(f"set one of max_tokens={max_tokens} and size={size}", code="batch.size-and-tokens")
    if size is not None:
        if size < 1:
            raise DataError(f"size must be at least 1 row, got {size}", code="batch.micro-batch-size")
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    assert max_tokens is not None  # one of the two is given
    if max_tokens < 1:
        raise DataError(f"max_tokens must be at least 1, got {max_tokens}", code="batch.micro-batch-size")
    check_longest(lengths, max_tokens)
    return _first_fit_decreasing(lengths, max_tokens)


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    free = np.full(len(lengths), max_tokens, dtype=np.int64)  # free tokens of every possible micro-batch
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        group = int(np.argmax(free >= lengths[row]))
        if group == len(groups):
            groups.append([])
        groups[group].append(row)
        free[group] -= lengths[row]
    return [sorted(group) for group in groups]


def _greedy_with_capacity(work: np.ndarray, tokens: np.ndarray, count: int, max_tokens: int) -> Parts | None:
    """Assign the longest row first, to the cheapest micro-batch with capacity; None if a row does not fit.

    Ties go to the micro-batch with the fewest rows, so that none stays empty.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    spent, tokens_used, rows = np.zeros(count), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for row in np.lexsort((-work, -tokens)).tolist():
        fits = np.flatnonzero(tokens_used + tokens[row] <= max_tokens)
        if not len(fits):
            return None
        group = int(fits[np.lexsort((rows[fits], spent[fits]))[0]])
        groups[group].append(row)
        spent[group] += work[row]
        tokens_used[group] += tokens[row]
        rows[group] += 1
    return [np.array(group, dtype=np.int64) for group in groups]


def _split_groups(groups: Sequence[Sequence[int]], work: np.ndarray, count: int) -> Parts:
    """Split the most expensive group with at least two rows until there are ``count`` groups."""
    parts = [np.array(group, dtype=np.int64) for group in groups]
    while len(parts) < count:
        heavy = max((index for index, part in enumerate(parts) if len(part) > 1), key=lambda i: work[parts[i]].sum())
        rows = parts[heavy][np.argsort(-work[parts[heavy]], kind="stable")]
        parts[heavy] = rows[::2]
        parts.append(rows[1::2])
    return parts
