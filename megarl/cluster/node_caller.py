"""Calls by node: in a large group one process on each node calls the ranks there.

A call costs the driver a fixed time per message, result and chunk. With one process per node, these are as many as
nodes instead of ranks. The process reads the values of its ranks' rows, and joins their results into one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import ray

from megarl.cluster.calls import PerRank, WorkerCall, for_rank, gather, stored_once
from megarl.cluster.partition import Partition, RankRows
from megarl.cluster.stored_chunks import Payload, attached, receive, separated
from megarl.cluster.worker_process import MappedRows, SplitResult, WorkerInfo, describe_process
from megarl.data.ragged import Chunk
from megarl.data.remote_columns import RowFunction

Rows = Mapping[int, RankRows]
"""Rows of the node's DP ranks, consecutive in a batch."""


class NodeCaller:
    """Ray actor that calls the ranks of one group on its node, one verb after the other.

    A verb ends with the first failure of a rank, see :func:`megarl.cluster.calls.gather`.

    Args:
        actors: processes of the ranks.
        dp_ranks: DP rank of each rank.
        owners: ranks here that own the results of DP ranks, by DP rank.
    """

    def __init__(
        self, role: str, actors: Mapping[int, Any], dp_ranks: Mapping[int, int], owners: Mapping[int, int]
    ) -> None:
        self._role, self._actors, self._dp_ranks, self._owners = role, actors, dp_ranks, owners
        self._infos: Mapping[int, WorkerInfo] = {}

    def connect(self, infos: Mapping[int, WorkerInfo]) -> WorkerInfo:
        """Receive the descriptions of the ranks' processes, for errors; returns that of this process."""
        self._infos = infos
        return describe_process()

    def call(self, verb: str, phase: str, keep: Sequence[int], kwargs: Mapping[str, Any], *args: Any) -> list[Any]:
        """Run a verb on all ranks, like :meth:`WorkerProcess.call`; ``keep`` are the ranks that return a result."""
        shared = stored_once(args)
        refs = {
            rank: actor.call.remote(verb, rank in keep, kwargs, *for_rank(shared, rank))
            for rank, actor in self._actors.items()
        }
        return self._gather(verb, phase, refs)

    @ray.method(num_returns=2)
    def call_split(
        self, verb: str, phase: str, rows: Rows, kwargs: Mapping[str, Any], *args: Any
    ) -> tuple[SplitResult, Chunk | None]:
        """Run a ``SPLIT`` verb on all ranks, like :meth:`WorkerProcess.call_split`."""
        parts = [_cut(arg, rows) if isinstance(arg, Payload) else arg for arg in args]
        by_rank = [
            PerRank({rank: part[dp] for rank, dp in self._dp_ranks.items()}) if isinstance(arg, Payload) else arg
            for arg, part in zip(args, parts, strict=True)
        ]
        owning = set(self._owners.values())
        both = {
            rank: actor.call_split.remote(verb, rank in owning, kwargs, *for_rank(by_rank, rank))
            for rank, actor in self._actors.items()
        }
        results = self._gather(verb, phase, {rank: refs[0] for rank, refs in both.items()})
        busy = [seconds for result in results for seconds in result.busy_s]
        by_owner = {
            rank: (result.result, both[rank][1]) for rank, result in zip(both, results, strict=True) if rank in owning
        }
        joined, chunk = self._join(rows, by_owner)
        return SplitResult(joined, busy), chunk

    @ray.method(num_returns=2)
    def map_rows(
        self, function: RowFunction, rows: Rows, payload: Payload, *args: Any
    ) -> tuple[MappedRows, Chunk | None]:
        """Run a row function on the owners of these rows, like :meth:`WorkerProcess.map_rows`."""
        parts = _cut(payload, rows)
        both = {
            self._owners[dp]: self._actors[self._owners[dp]].map_rows.remote(function, parts[dp], *args) for dp in rows
        }
        name = function.__name__
        results: list[MappedRows] = self._gather(name, name, {rank: refs[0] for rank, refs in both.items()})
        columns = {rank: (result.columns, both[rank][1]) for rank, result in zip(both, results, strict=True)}
        joined, chunk = self._join(rows, columns)
        return MappedRows(joined, [fact for result in results for fact in result.facts]), chunk

    def _gather(self, verb: str, phase: str, refs: Mapping[int, ray.ObjectRef]) -> list[Any]:
        infos = self._infos
        return gather([WorkerCall(ref, self._role, rank, verb, phase, infos.get(rank)) for rank, ref in refs.items()])

    def _join(self, rows: Rows, results: Mapping[int, tuple[Any, ray.ObjectRef]]) -> tuple[Any, Chunk | None]:
        """Join the owners' results and chunks, by rank, in the order of the DP ranks."""
        owned = [dp for dp in rows if dp in self._owners]
        if not owned:
            return None, None
        ends = accumulate((rows[dp].rows for dp in owned), initial=0)
        partition = Partition([list(range(begin, end)) for begin, end in pairwise(ends)])
        return separated(partition.collect([attached(*results[self._owners[dp]]) for dp in owned]))


def _cut(payload: Payload, rows: Rows) -> dict[int, ray.ObjectRef]:
    """Read the values of a batch, and store the part of each DP rank."""
    [batch] = receive([payload])
    ends = accumulate((of.rows for of in rows.values()), initial=0)
    parts = {}
    for (dp, of), (begin, end) in zip(rows.items(), pairwise(ends), strict=True):
        part = batch[begin:end]
        part.meta_info |= of.info
        parts[dp] = ray.put(part)
    return parts
