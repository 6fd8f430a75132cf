"""Interface between workers and the driver: verb marks, worker places, results of a save.

A verb is a public method of a worker class that the driver calls on all processes of the role at once. The decorator
changes nothing: under torchrun or in a test the method is called directly. Only ``megarl.cluster`` reads the marks.
This module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megarl.base.files import FileEntry

if TYPE_CHECKING:
    from megarl.data import DataProto

MINI_BATCH_SIZES = "mini_batch_sizes"
"""Key in a chunk's ``meta_info``: the chunk's rows per mini-batch, in order."""
UPDATE_ROWS = "update_mini_batch_rows"
"""Key in a batch's ``meta_info``: rows per global mini-batch of the update that reads the results of the other verbs.

Verbs without mini-batches then give each DP rank the rows that it gets in the update: token values stay on its node.
"""
_ATTRIBUTE = "__megarl_verb__"
_Function = TypeVar("_Function", bound=Callable[..., object])


class Dispatch(Enum):
    """The arguments that each process receives and the results that are collected.

    The owner of a result is the process with tensor-parallel rank 0 on the last pipeline stage.
    """

    SPLIT = "split"
    """Every ``DataProto`` argument is split by rows over DP; all TP and PP ranks of one DP rank get the same chunk.
    Other arguments go to all. One owner per DP rank returns a ``DataProto``, joined in the caller's row order, or a
    ``dict`` or None, of which DP rank 0's is used.

    """
    ALL = "all"
    """Same arguments to every rank; the result lists all ranks' results, by rank."""
    ONE = "one"
    """Same arguments to every rank; the result is that of DP rank 0's owner."""
    RANK = "rank"
    """Called on one given rank, independently of the others."""


@dataclass(frozen=True)
class VerbMark:
    """Dispatch of one verb.

    Attributes:
        dispatch: arguments of each process, and collection of the results.
        mini_batches: for ``SPLIT``, the key in ``batch.meta_info`` that holds the rows per global mini-batch. Every DP
            rank then gets a share of each mini-batch, mini-batch after mini-batch, with its row counts under
            :data:`MINI_BATCH_SIZES`. The rows of a mini-batch do not depend on DP. None: the verb only maps rows.
        phase: the phase named in errors; the verb's name if empty.
        columns: for ``SPLIT``, the columns that the verb reads, tensors and others; the other columns of a batch are
            not sent. None: all columns.
        equal_rows: for ``SPLIT``, every DP rank gets the same number of rows. Implied by ``mini_batches``, unless the
            role's micro-batches have a token budget: the number of rows is free then.
    """

    dispatch: Dispatch
    mini_batches: str | None = None
    phase: str = ""
    columns: tuple[str, ...] | None = None
    equal_rows: bool = False

    def read(self, batch: DataProto) -> DataProto:
        """Select the columns that the verb reads."""
        return batch if self.columns is None else batch.present(self.columns)


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
        ValueError: ``mini_batches`` or ``equal_rows`` without ``Dispatch.SPLIT``.
    """
    if (mini_batches is not None or equal_rows) and dispatch is not Dispatch.SPLIT:
        raise ValueError(f"mini_batches={mini_batches!r}, equal_rows={equal_rows} needs Dispatch.SPLIT, not {dispatch}")
    equal_rows = equal_rows or mini_batches is not None

    def mark(function: _Function) -> _Function:
        setattr(function, _ATTRIBUTE, VerbMark(dispatch, mini_batches, phase or function.__name__, columns, equal_rows))
        return function

    return mark


def read_marks(worker_cls: type) -> dict[str, VerbMark]:
    """Return the verbs of a worker class by name, inherited ones included.

    An override without a decorator keeps the mark of the overridden method.
    """
    marks: dict[str, VerbMark] = {}
    for base in reversed(worker_cls.__mro__):
        for name, member in vars(base).items():
            mark = getattr(member, _ATTRIBUTE, None)
            if isinstance(mark, VerbMark):
                marks[name] = mark
    return marks


class WorkerPlace(NamedTuple):
    """Rank and rendezvous address of a worker; the first argument of every worker class.

    Attributes:
        master_addr: address of the role's rank 0.
        master_port: free port there for the process group.
    """

    rank: int
    world_size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class SavedPart:
    """One rank's part of a checkpoint.

    Attributes:
        entries: size and digest of each file that the rank wrote, by path relative to the role's folder.
        failure: reason why there is no checkpoint, the same on every rank; empty if there is one.
    """

    entries: dict[str, FileEntry] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
