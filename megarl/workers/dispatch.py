"""Marks that say how a worker's verb is called across its processes.

A verb is a public method of a worker class that the driver calls on all processes of the role at once. The decorator
changes nothing: under torchrun or in a test the method is called as it stands. Only ``megarl.cluster`` reads the marks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from megarl.data import DataProto

MINI_BATCH_SIZES = "mini_batch_sizes"
"""Key in a chunk's ``meta_info``: how many of its rows belong to each mini-batch, in order."""
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
    RANK = "rank"
    """Called on one rank, which the caller names, independently of the others."""


@dataclass(frozen=True)
class VerbMark:
    """How one verb is dispatched.

    Attributes:
        dispatch: what each process receives and whose result counts.
        mini_batches: for ``SPLIT``, the key in ``batch.meta_info`` that holds the rows per global mini-batch. Every DP
            rank then gets a share of each mini-batch, mini-batch after mini-batch, with its counts of rows under
            :data:`MINI_BATCH_SIZES`, and which rows form a mini-batch does not depend on DP. None: the verb only maps
            rows.
        phase: the phase named in errors; the verb's own name if empty.
        columns: for ``SPLIT``, the columns that the verb reads, tensors and others; of each batch only those among them
            that it has are sent. None: everything is.
        equal_rows: for ``SPLIT``, every DP rank gets equally many rows; so it is where there are ``mini_batches``,
            unless the role's micro-batches have a token budget, which leaves the number of rows free.
    """

    dispatch: Dispatch
    mini_batches: str | None = None
    phase: str = ""
    columns: tuple[str, ...] | None = None
    equal_rows: bool = False

    def read(self, batch: DataProto) -> DataProto:
        """The part of a batch that the verb reads."""
        if self.columns is None:
            return batch
        present = [[name for name in self.columns if name in kind] for kind in (batch.tensors, batch.non_tensor_batch)]
        return batch.select(*present)


def verb(
    dispatch: Dispatch,
    *,
    mini_batches: str | None = None,
    phase: str | None = None,
    columns: tuple[str, ...] | None = None,
    equal_rows: bool = False,
) -> Callable[[_Function], _Function]:
    """Mark a method as a verb; see :class:`VerbMark` for the arguments.

    Raises:
        ValueError: ``mini_batches`` or ``equal_rows`` is given for a verb whose arguments are not split.
    """
    if (mini_batches is not None or equal_rows) and dispatch is not Dispatch.SPLIT:
        raise ValueError(f"mini_batches={mini_batches!r}, equal_rows={equal_rows} needs Dispatch.SPLIT, not {dispatch}")
    equal_rows = equal_rows or mini_batches is not None

    def mark(function: _Function) -> _Function:
        setattr(function, _ATTRIBUTE, VerbMark(dispatch, mini_batches, phase or function.__name__, columns, equal_rows))
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
