"""Targets of a worker group's calls: a rank's process, or the process that calls a node's ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import ray

from megarl.cluster.calls import PerRank, WorkerCall, for_rank
from megarl.cluster.partition import Partition
from megarl.cluster.worker_process import WorkerInfo
from megarl.data.remote_columns import RowFunction


class StartedCall(NamedTuple):
    """A call in progress.

    Attributes:
        chunk: reference to the result's token values.
    """

    call: WorkerCall
    chunk: ray.ObjectRef


@dataclass(frozen=True)
class CallTarget:
    """A process that is called for some ranks.

    Attributes:
        actor: a :class:`~megarl.cluster.worker_process.WorkerProcess`, or for several ranks a
            :class:`~megarl.cluster.node_caller.NodeCaller`; both have the methods that start here.
        ranks: in order.
        share: DP ranks whose rows the target receives.
        owned: DP ranks whose results it returns.
        info: the process; None before it has described itself.
    """

    role: str
    actor: Any
    ranks: tuple[int, ...]
    share: tuple[int, ...]
    owned: tuple[int, ...]
    info: WorkerInfo | None = None

    @property
    def is_node(self) -> bool:
        """Whether the process calls the ranks of a node."""
        return len(self.ranks) > 1

    def call(
        self, verb: str, phase: str, keep: Collection[int], kwargs: Mapping[str, Any], args: Sequence[Any]
    ) -> WorkerCall:
        """Start a verb, see :meth:`results`; the ranks in ``keep`` return their results, others None."""
        if self.is_node:
            kept = [rank for rank in self.ranks if rank in keep]
            ref = self.actor.call.remote(verb, kept, kwargs, *self._for_ranks(args))
        else:
            ref = self.actor.call.remote(verb, self.ranks[0] in keep, kwargs, *for_rank(args, self.ranks[0]))
        return self.called(ref, verb, phase)

    def results(self, result: Any) -> list[Any]:
        """Return the ranks' results of :meth:`call`."""
        return result if self.is_node else [result]

    def call_split(
        self, verb: str, phase: str, partition: Partition, kwargs: Mapping[str, Any], args: Sequence[Any]
    ) -> StartedCall:
        """Start a ``SPLIT`` verb on the target's rows; the result is a ``SplitResult``."""
        if self.is_node:
            own = partition.of_ranks(self.share)
            ref, chunk = self.actor.call_split.remote(verb, own, kwargs, *self._for_ranks(args))
        else:
            ref, chunk = self.actor.call_split.remote(verb, bool(self.owned), kwargs, *for_rank(args, self.ranks[0]))
        return StartedCall(self.called(ref, verb, phase), chunk)

    def map_rows(self, function: RowFunction, partition: Partition, payload: Any, args: Sequence[Any]) -> StartedCall:
        """Start a row function on the target's rows; the result is a ``MappedRows``."""
        own = [partition.of_ranks(self.owned)] if self.is_node else []
        ref, chunk = self.actor.map_rows.remote(function, *own, payload, *args)
        return StartedCall(self.called(ref, function.__name__, function.__name__), chunk)

    def call_scatter(
        self, verb: str, phase: str, receivers: Mapping[int, Sequence[int]], width: int, args: Sequence[Any]
    ) -> tuple[WorkerCall, dict[int, ray.ObjectRef]]:
        """Start a verb that returns payloads; returns the call, and the reference to each receiver's payloads."""
        own = {rank: receivers.get(rank, ()) for rank in self.ranks}
        places = sorted(set(chain.from_iterable(own.values())))
        start = self.actor.call_scatter.options(num_returns=len(places) + 1)
        if self.is_node:
            refs = start.remote(verb, own, width, *self._for_ranks(args))
        else:
            refs = start.remote(verb, places, width, *for_rank(args, self.ranks[0]))
        *payloads, done = [refs] if isinstance(refs, ray.ObjectRef) else refs  # Ray returns one reference as it is
        return self.called(done, verb, phase), dict(zip(places, payloads, strict=True))

    def _for_ranks(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments with the values of this target's ranks only."""
        return [
            PerRank({rank: arg.values[rank] for rank in self.ranks}) if isinstance(arg, PerRank) else arg
            for arg in args
        ]

    def called(self, ref: ray.ObjectRef, verb: str, phase: str) -> WorkerCall:
        """Describe a call on the process."""
        return WorkerCall(ref, self.role, self.ranks[0], verb, phase, self.info, self.ranks[1:])
