"""Steps that all ranks of a role take, or none: a failure anywhere is an error everywhere, and none waits in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megarl.errors import CheckpointError
from megarl.megatron.runtime import Runtime

_T = TypeVar("_T")


def together(runtime: Runtime, action: Callable[[], _T], doing: str) -> _T:
    """Runs ``action`` on every rank; communicates.

    Args:
        runtime: this rank's place.
        action: must not communicate itself.
        doing: what it is about, for the message.

    Raises:
        CheckpointError: on every rank, if it raised on any; says on which and why.
    """
    failure, result = None, None
    try:
        result = action()
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures: list[str | None] = [None] * runtime.layout.world_size
    dist.all_gather_object(failures, failure)
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointError(f"{doing} failed on rank {rank}: {text}")
    return result  # type: ignore[return-value]  # no failure: the action has returned


def on_first_rank(runtime: Runtime, mine: Any, action: Callable[[list[Any]], Sequence[_T]], doing: str) -> _T:
    """Brings a value of every rank to rank 0 and gives every rank its part of what is made of them; communicates.

    Args:
        runtime: this rank's place.
        mine: this rank's value.
        action: from the values, by rank, to the results, by rank; runs on rank 0.
        doing: what it is about, for the message.

    Raises:
        CheckpointError: on every rank, if ``action`` raised.
    """
    size = runtime.layout.world_size
    values: list[Any] | None = [None] * size if runtime.rank == 0 else None
    dist.gather_object(mine, values, dst=0)
    results: list[Any] = [None] * size

    def run() -> None:
        if values is not None:
            results[:] = action(values)

    together(runtime, run, doing)
    received: list[Any] = [None]
    dist.scatter_object_list(received, results if runtime.rank == 0 else None, src=0)
    part: _T = received[0]
    return part
