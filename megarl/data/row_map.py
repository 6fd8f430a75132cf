"""Row functions: work on each row of a batch independently, on parts of the batch in several processes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megarl.data.columns import COLUMNS
from megarl.data.protocol import DataProto

RowFunction = Callable[..., tuple[DataProto, Any]]
"""Maps a part of a batch, and further arguments, to new columns of its rows and facts about the part.

A process imports it by name, so it is a function of a module.
"""


class RowMap(Protocol):
    """Runs row functions on a batch."""

    def __call__(
        self,
        function: RowFunction,
        columns: Sequence[str],
        batch: DataProto,
        *args: Any,
        group_by: str | None = None,
    ) -> tuple[DataProto, list[Any]]:
        """Run a function on the parts of a batch.

        Args:
            columns: those that the function reads, tensors and others; absent ones are left out.
            group_by: non-tensor column; rows with equal values are in one part, such as the responses to one prompt.
                None: each part is any rows.

        Returns:
            The new columns in the order of ``batch``, whose token values stay where they were computed; and the facts
            of each part.
        """


def map_in_process(
    function: RowFunction, columns: Sequence[str], batch: DataProto, *args: Any, group_by: str | None = None
) -> tuple[DataProto, list[Any]]:
    """Run a row function on the whole batch in this process; a :class:`RowMap`."""
    result, facts = function(batch.present(columns), *args)
    return result, [facts]


def with_tokens(batch: DataProto, result: DataProto) -> DataProto:
    """Return the batch with the token columns of the result of a row function, added or replaced."""
    return batch.with_columns(token_part(result).tensors)


def token_part(result: DataProto) -> DataProto:
    """Select the token columns of the result of a row function."""
    return result.select([name for name in result.tensors if name in COLUMNS])
