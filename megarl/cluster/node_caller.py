"""Calls by node: in a large group one process on each node calls the ranks there.

A call costs the driver a fixed time per message, result and chunk. With one process per node, these are as many as
nodes instead of ranks. The process reads the values of its ranks' rows, and joins their results into one chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.call_targets import CallTarget
from megarl.cluster.calls import gather
from megarl.cluster.partition import Partition
from megarl.cluster.split_calls import RowFunctionCall, SplitCall
from megarl.cluster.stored_chunks import Payload, receive, separated, stored_once
from megarl.cluster.worker_process import MappedRows, SplitResult, WorkerInfo, describe_process
from megarl.data.ragged import Chunk
from megarl.data.remote_columns import RowFunction
from megarl.workers.dispatch import VerbMark

FEWEST_RANKS = 64
"""A smaller group is called rank by rank: a verb costs its driver less than a tenth of a second."""


class NodeCaller:
    """Ray actor that calls the ranks of one group on its node, one verb after the other.

    A verb ends with the first failure of a rank, see :func:`megarl.cluster.calls.gather`.

    Args:
        targets: the ranks; their DP ranks are numbered among those of this node.
    """

    def __init__(self, targets: Sequence[CallTarget]) -> None:
        self._targets = list(targets)

    def connect(self, infos: Mapping[int, WorkerInfo]) -> WorkerInfo:
        """Receive the descriptions of the ranks' processes; returns that of this process."""
        self._targets = [replace(target, info=infos[target.ranks[0]]) for target in self._targets]
        return describe_process()

    def call(self, verb: str, keep: Sequence[int], kwargs: Mapping[str, Any], *args: Any) -> list[Any]:
        """Run a verb on all ranks; those in ``keep`` return their results, others None."""
        phase, shared = self._mark(verb).phase, stored_once(args)
        return gather([target.call(verb, phase, keep, kwargs, shared) for target in self._targets])

    @ray.method(num_returns=2)
    def call_split(
        self, verb: str, partition: Partition, kwargs: Mapping[str, Any], *args: Any
    ) -> tuple[SplitResult, Chunk | None]:
        """Run a ``SPLIT`` verb on all ranks, like :meth:`.WorkerProcess.call_split`."""
        split = SplitCall(partition, self._targets)
        results = gather(split.start(verb, self._mark(verb), receive(args), kwargs))
        joined, chunk = separated(split.collect(results))
        return SplitResult(joined, split.busy(results)), chunk

    @ray.method(num_returns=2)
    def map_rows(
        self, function: RowFunction, partition: Partition, payload: Payload, *args: Any
    ) -> tuple[MappedRows, Chunk | None]:
        """Run a row function on the ranks that own results, like :meth:`.WorkerProcess.map_rows`."""
        owners = sorted((target for target in self._targets if target.owned), key=lambda target: target.owned)
        mapped = RowFunctionCall(partition, [replace(owner, owned=(at,)) for at, owner in enumerate(owners)])
        [batch] = receive([payload])
        columns, facts = mapped.collect(gather(mapped.start(function, batch, args)))
        joined, chunk = separated(columns)
        return MappedRows(joined, facts), chunk

    def call_scatter(
        self, verb: str, receivers: Mapping[int, Sequence[int]], width: int, *args: Any
    ) -> tuple[Any, ...]:
        """Run a verb that returns payloads on all ranks, like :meth:`.WorkerProcess.call_scatter`.

        Returns:
            The payloads for each receiver, of all ranks in order; then None.
        """
        phase = self._mark(verb).phase
        started = [target.call_scatter(verb, phase, receivers, width, args) for target in self._targets]
        gather([call for call, _ in started])
        places = sorted(set(chain(*receivers.values())))
        of_places = ([refs[place] for _, refs in started if place in refs] for place in places)
        return (*(list(chain(*ray.get(refs))) for refs in of_places), None)

    def _mark(self, verb: str) -> VerbMark:
        info = self._targets[0].info
        assert info is not None, "connect() comes first"
        return info.marks[verb]


class CallTargets:
    """The targets of a group's calls: its ranks, or in a large group the callers of its nodes.

    Args:
        dp_ranks: DP rank of each rank.
        owners: rank that owns the results of each DP rank.
    """

    def __init__(self, role: str, dp_ranks: Sequence[int], owners: Sequence[int]) -> None:
        self._role, self._dp_ranks = role, dp_ranks
        self._owned = {owner: dp for dp, owner in enumerate(owners)}
        self._nodes: list[CallTarget] = []

    @property
    def has_callers(self) -> bool:
        """Whether processes on the nodes call the ranks."""
        return bool(self._nodes)

    def start_callers(self, nodes: Mapping[int, str | None], processes: Mapping[int, Any]) -> None:
        """Start each node's caller without waiting, if the group is large.

        Args:
            nodes: node of each rank; None = unknown.
            processes: process of each rank.
        """
        by_node: dict[str | None, list[int]] = defaultdict(list)
        for rank in sorted(processes) if len(processes) >= FEWEST_RANKS else ():
            by_node[nodes[rank]].append(rank)
        for node, ranks in by_node.items():
            if node is not None and len(ranks) > 1:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                caller = ray.remote(NodeCaller).options(num_cpus=0, scheduling_strategy=strategy)
                self.add_node(caller.remote(self.of_node(ranks, processes)), ranks)

    def of_node(self, ranks: Sequence[int], processes: Mapping[int, Any]) -> list[CallTarget]:
        """Return the ranks of a node as targets of its caller, with DP ranks numbered among those of the node."""
        numbers = {dp: number for number, dp in enumerate(self._target(None, ranks).share)}
        targets = [self._target(processes[rank], [rank]) for rank in ranks]
        return [
            replace(
                target,
                share=tuple(numbers[dp] for dp in target.share),
                owned=tuple(numbers[dp] for dp in target.owned),
            )
            for target in targets
        ]

    def add_node(self, caller: Any, ranks: Sequence[int]) -> None:
        """Have these ranks called by a :class:`NodeCaller`."""
        self._nodes.append(self._target(caller, ranks))

    def connect(self, infos: Mapping[int, WorkerInfo]) -> None:
        """Describe the ranks' processes to the callers, and wait for their start.

        Raises:
            WorkerFailed: a caller did not start.
        """
        calls = [
            node.called(node.actor.connect.remote({rank: infos[rank] for rank in node.ranks}), "start", "")
            for node in self._nodes
        ]
        self._nodes = [replace(node, info=info) for node, info in zip(self._nodes, gather(calls), strict=True)]

    def of(self, processes: Mapping[int, Any], infos: Mapping[int, WorkerInfo]) -> list[CallTarget]:
        """Return the targets that reach all processes, by first rank."""
        called = {rank for node in self._nodes for rank in node.ranks}
        ranks = [
            self._target(actor, [rank], infos.get(rank)) for rank, actor in processes.items() if rank not in called
        ]
        return sorted([*self._nodes, *ranks], key=lambda target: target.ranks[0])

    def end_callers(self) -> None:
        """End the callers; each rank is a target from now on."""
        for node in self._nodes:
            ray.kill(node.actor)
        self._nodes.clear()

    def _target(self, actor: Any, ranks: Sequence[int], info: WorkerInfo | None = None) -> CallTarget:
        share = tuple(sorted({self._dp_ranks[rank] for rank in ranks}))
        owned = tuple(sorted(self._owned[rank] for rank in ranks if rank in self._owned))
        return CallTarget(self._role, actor, tuple(ranks), share, owned, info)
