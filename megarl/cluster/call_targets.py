"""Targets of a worker group's calls: each rank, or in a large group each node's caller."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.calls import PerRank, WorkerCall, for_rank, gather
from megarl.cluster.node_caller import NodeCaller
from megarl.cluster.partition import RankRows
from megarl.cluster.worker_process import WorkerInfo
from megarl.data.remote_columns import RowFunction

FEWEST_RANKS = 64
"""A smaller group is called rank by rank: a verb costs its driver less than a tenth of a second."""


class StartedCall(NamedTuple):
    """A call in progress.

    Attributes:
        chunk: reference to the result's token values.
    """

    call: WorkerCall
    chunk: ray.ObjectRef


@dataclass(frozen=True)
class CallTarget:
    """A process that the driver calls: a rank, or the caller of a node's ranks.

    Attributes:
        ranks: in order.
        share: DP ranks whose rows the target receives.
        owned: DP ranks whose results it returns.
        info: the process.
    """

    role: str
    actor: Any
    ranks: tuple[int, ...]
    share: tuple[int, ...]
    owned: tuple[int, ...]
    info: WorkerInfo | None

    @property
    def is_node(self) -> bool:
        """Whether the process is a node's caller."""
        return len(self.ranks) > 1

    def call(
        self, verb: str, phase: str, keep: Collection[int], kwargs: Mapping[str, Any], args: Sequence[Any]
    ) -> WorkerCall:
        """Start a verb; the result has the results of all ranks of the target; see :meth:`results`."""
        if self.is_node:
            kept = [rank for rank in self.ranks if rank in keep]
            ref = self.actor.call.remote(verb, phase, kept, kwargs, *self._for_ranks(args))
        else:
            ref = self.actor.call.remote(verb, self.ranks[0] in keep, kwargs, *for_rank(args, self.ranks[0]))
        return self.called(ref, verb, phase)

    def results(self, result: Any) -> list[Any]:
        """Return the ranks' results of :meth:`call`."""
        return result if self.is_node else [result]

    def call_split(
        self, verb: str, phase: str, rows: Mapping[int, RankRows], kwargs: Mapping[str, Any], args: Sequence[Any]
    ) -> StartedCall:
        """Start a ``SPLIT`` verb; the result is a ``SplitResult``."""
        if self.is_node:
            ref, chunk = self.actor.call_split.remote(verb, phase, rows, kwargs, *self._for_ranks(args))
        else:
            ref, chunk = self.actor.call_split.remote(verb, bool(self.owned), kwargs, *for_rank(args, self.ranks[0]))
        return StartedCall(self.called(ref, verb, phase), chunk)

    def map_rows(
        self, function: RowFunction, rows: Mapping[int, RankRows], payload: Any, args: Sequence[Any]
    ) -> StartedCall:
        """Start a row function; the result is a ``MappedRows``."""
        arguments = (rows, payload, *args) if self.is_node else (payload, *args)
        ref, chunk = self.actor.map_rows.remote(function, *arguments)
        return StartedCall(self.called(ref, function.__name__, function.__name__), chunk)

    def _for_ranks(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments with the values of this target's ranks only."""
        return [
            PerRank({rank: arg.values[rank] for rank in self.ranks}) if isinstance(arg, PerRank) else arg
            for arg in args
        ]

    def called(self, ref: ray.ObjectRef, verb: str, phase: str) -> WorkerCall:
        """Describe a call on the process."""
        return WorkerCall(ref, self.role, self.ranks[0], verb, phase, self.info, self.ranks[1:])


class CallTargets:
    """The targets of a group; see :class:`CallTarget`.

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
        """Whether some ranks are called by a process on their node."""
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
                place = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = (
                    ray.remote(NodeCaller)
                    .options(num_cpus=0, scheduling_strategy=place)
                    .remote(
                        self._role,
                        {rank: processes[rank] for rank in ranks},
                        {rank: self._dp_ranks[rank] for rank in ranks},
                        {self._owned[rank]: rank for rank in ranks if rank in self._owned},
                    )
                )
                self._nodes.append(self._target(actor, ranks, None))

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
            self._target(actor, (rank,), infos.get(rank)) for rank, actor in processes.items() if rank not in called
        ]
        return sorted([*self._nodes, *ranks], key=lambda target: target.ranks[0])

    def end_callers(self) -> None:
        """End the callers; each rank is a target from now on."""
        for node in self._nodes:
            ray.kill(node.actor)
        self._nodes.clear()

    def _target(self, actor: Any, ranks: Sequence[int], info: WorkerInfo | None) -> CallTarget:
        share = tuple(sorted({self._dp_ranks[rank] for rank in ranks}))
        owned = tuple(sorted(self._owned[rank] for rank in ranks if rank in self._owned))
        return CallTarget(self._role, actor, tuple(ranks), share, owned, info)
