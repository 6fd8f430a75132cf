"""Which rows go through the model together.

A micro-batch is computed packed, so what bounds it is its number of tokens, not its longest row times its rows. The
plan never changes a result: losses are normalised by counts over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megarl.data.even_out import Parts, Room, even_out
from megarl.errors import DataError


def fewest_micro_batches(lengths: Sequence[int], *, max_tokens: int | None = None, size: int | None = None) -> int:
    """How many micro-batches :func:`plan_micro_batches` makes where no count is asked for; it raises likewise."""
    return len(_fewest(lengths, max_tokens, size))


def common_count(counts: Sequence[int], multiple: int) -> int:
    """The number of micro-batches that suits all data-parallel ranks, given what each needs at least.

    Ranks must agree where a collective of all of them is part of a micro-batch's forward (expert parallelism), and the
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
    """Cut rows into micro-batches, each row into exactly one, none of them empty.

    With ``max_tokens``, first-fit decreasing (longest row first, into the first micro-batch with room) tells how many
    are needed: at most 11/9 of the fewest possible, plus 6/9 (Dosa 2007). The rows are then spread over that many,
    or over ``count``, so that micro-batches cost about the same: the stages of a pipeline, and data-parallel ranks that
    meet in every micro-batch, wait for the most expensive one. With ``size``, consecutive rows are taken. All depends
    on nothing but the arguments.

    Args:
        lengths: tokens of each row, prompt and response.
        max_tokens: tokens a micro-batch may hold.
        size: rows a micro-batch may hold.
        count: how many micro-batches to make, where more are wanted than needed.
        costs: work per row, with ``max_tokens``; its tokens if None.

    Returns:
        Row numbers of each micro-batch, ascending; with ``max_tokens`` the one with most tokens, which needs most
        memory, comes first.

    Raises:
        DataError: not exactly one of the two limits is given, a limit is below 1, a row is above ``max_tokens``, or
            ``count`` is less than needed or more than there are rows.
    """
    groups = _fewest(lengths, max_tokens, size)
    count = len(groups) if count is None else count
    if not len(groups) <= count <= len(lengths):
        raise DataError(
            f"{len(lengths)} rows that need {len(groups)} micro-batches cannot be cut into {count}; give each "
            "data-parallel rank more rows, or a larger budget per micro-batch"
        )
    if max_tokens is None:
        return (
            groups if count == len(groups) else [part.tolist() for part in np.array_split(range(len(lengths)), count)]
        )
    tokens = np.asarray(lengths, dtype=np.int64)
    work = tokens.astype(np.float64) if costs is None else np.asarray(costs, dtype=np.float64)
    start = _greedy_with_room(work, tokens, count, max_tokens) or _divided(groups, work, count)
    even = even_out(work, start, fixed_sizes=False, room=Room(tokens, max_tokens))
    by_tokens = sorted(even, key=lambda group: (-int(tokens[group].sum()), int(group.min())))
    return [sorted(group.tolist()) for group in by_tokens]


def check_longest(lengths: Sequence[int], max_tokens: int, name: Callable[[int], str] = "row {}".format) -> None:
    """Checks that every row fits into a micro-batch.

    Args:
        lengths: tokens of each row.
        max_tokens: tokens a micro-batch may hold.
        name: how to call a row, by its number.

    Raises:
        DataError: a row has more tokens; names it and says what would be right.
    """
    for row, length in enumerate(lengths):
        if not 0 <= length <= max_tokens:
            raise DataError(
                f"{name(row)} has {length} tokens, a micro-batch may hold {max_tokens}; raise the token budget per "
                "device (*max_token_len_per_gpu) to at least the longest prompt plus response"
            )


def _fewest(lengths: Sequence[int], max_tokens: int | None, size: int | None) -> list[list[int]]:
    if (max_tokens is None) == (size is None):
        raise DataError(f"give either max_tokens or size, got max_tokens={max_tokens} and size={size}")
    if size is not None:
        if size < 1:
            raise DataError(f"size must be at least 1 row, got {size}")
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    assert max_tokens is not None  # one of the two is given
    if max_tokens < 1:
        raise DataError(f"max_tokens must be at least 1, got {max_tokens}")
    check_longest(lengths, max_tokens)
    return _first_fit_decreasing(lengths, max_tokens)


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


def _greedy_with_room(work: np.ndarray, tokens: np.ndarray, count: int, max_tokens: int) -> Parts | None:
    """Longest row first, to the cheapest micro-batch with room; None where the last rows find none.

    Of equally cheap ones the emptiest is taken, so that none stays empty.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    spent, held, rows = np.zeros(count), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for row in np.lexsort((-work, -tokens)).tolist():
        fits = np.flatnonzero(held + tokens[row] <= max_tokens)
        if not len(fits):
            return None
        group = int(fits[np.lexsort((rows[fits], spent[fits]))[0]])
        groups[group].append(row)
        spent[group] += work[row]
        held[group] += tokens[row]
        rows[group] += 1
    return [np.array(group, dtype=np.int64) for group in groups]


def _divided(groups: Sequence[Sequence[int]], work: np.ndarray, count: int) -> Parts:
    """``groups``, the most expensive of those with two rows or more divided until there are ``count``."""
    parts = [np.array(group, dtype=np.int64) for group in groups]
    while len(parts) < count:
        heavy = max((index for index, part in enumerate(parts) if len(part) > 1), key=lambda i: work[parts[i]].sum())
        rows = parts[heavy][np.argsort(-work[parts[heavy]], kind="stable")]
        parts[heavy] = rows[::2]
        parts.append(rows[1::2])
    return parts
