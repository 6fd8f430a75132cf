"""Marks that say how a worker's verb is called across its processes.

A verb is a public method of a worker class that the driver calls on all processes of the role at once. The decorator
changes nothing: under torchrun or in a test the method is called as it stands. Only ``megarl.cluster`` reads the marks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

_ATTRIBUTE = "__megarl_verb__"
_Function = TypeVar("_Function", bound=Callable[..., object])


class Dispatch(Enum):
    """What each process receives and whose result counts.

    The owner of a result is the process with tensor-parallel rank 0 on the last pipeline stage.
    """

    SPLIT = "split"
    """Every ``DataProto`` argument is split by rows over DP; all TP and PP ranks of one DP rank get the same chunk.
    Other arguments go to all. One owner per DP rank answers with a ``DataProto``, put back into the caller's row
    order, or with a ``dict`` or None, of which DP rank 0's counts."""
    ALL = "all"
    """Same arguments to every rank; the result is the list of what all ranks returned, by rank."""
    ONE = "one"
    """Same arguments to every rank; the result is what the owner at DP rank 0 returned."""


@dataclass(frozen=True)
class VerbMark:
    """How one verb is dispatched.

    Attributes:
        dispatch: what each process receives and whose result counts.
        mini_batches: for ``SPLIT``, the key in ``batch.meta_info`` that holds the rows per global mini-batch. Every DP
            rank then gets an equal count of rows of each mini-batch, mini-batch after mini-batch, and which rows form
            a mini-batch does not depend on DP. None: the verb only maps rows, and ranks may get different counts.
        phase: the phase named in errors; the verb's own name if empty.
        columns: for ``SPLIT``, the tensor columns that the verb reads; of each batch only those among them that it has
            are sent, and no non-tensor column. None: everything is.
    """

    dispatch: Dispatch
    mini_batches: str | None = None
    phase: str = ""
    columns: tuple[str, ...] | None = None


def verb(
    dispatch: Dispatch,
    *,
    mini_batches: str | None = None,
    phase: str | None = None,
    columns: tuple[str, ...] | None = None,
) -> Callable[[_Function], _Function]:
    """Mark a method as a verb; see :class:`VerbMark` for the arguments.

    Raises:
        ValueError: ``mini_batches`` is given for a verb whose arguments are not split.
    """
    if mini_batches is not None and dispatch is not Dispatch.SPLIT:
        raise ValueError(f"mini_batches={mini_batches!r} needs Dispatch.SPLIT, not {dispatch}")

    def mark(function: _Function) -> _Function:
        setattr(function, _ATTRIBUTE, VerbMark(dispatch, mini_batches, phase or function.__name__, columns))
        return function

    return mark


def read_marks(worker_cls: type) -> dict[str, VerbMark]:
    """The verbs of a worker class by name, inherited ones included.

    An override without a decorator keeps the mark of the method that it overrides.
    """
    marks: dict[str, VerbMark] = {}
    for base in reversed(worker_cls.__mro__):
        for name, member in vars(base).items():
            mark = getattr(member, _ATTRIBUTE, None)
            if isinstance(mark, VerbMark):
                marks[name] = mark
    return marks
