"""Calls on the rows of a batch: each target receives its rows, and the results return in the batch's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from megarl.cluster.call_targets import CallTarget, StartedCall
from megarl.cluster.calls import WorkerCall
from megarl.cluster.partition import Partition
from megarl.cluster.stored_chunks import StoredChunk, attached, payloads_of
from megarl.cluster.worker_process import MappedRows, SplitResult
from megarl.data import DataProto
from megarl.data.remote_columns import RowFunction
from megarl.workers.dispatch import VerbMark


class SplitCall:
    """One call of a ``SPLIT`` verb."""

    def __init__(self, partition: Partition, targets: Sequence[CallTarget]) -> None:
        self._partition, self._targets = partition, targets
        self._started: list[StartedCall] = []

    def start(self, verb: str, mark: VerbMark, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[WorkerCall]:
        """Start the verb on all targets."""
        self._started = [
            target.call_split(verb, mark.phase, self._partition, kwargs, part)
            for target, part in zip(self._targets, self._arguments(mark, args), strict=True)
        ]
        return [one.call for one in self._started]

    def collect(self, results: Sequence[SplitResult]) -> Any:
        """Join the results of the owners, None without owners; the token values stay where they are."""
        by_share = {
            target.owned: attached(result.result, one.chunk)
            for target, one, result in zip(self._targets, self._started, results, strict=True)
            if target.owned
        }
        if not by_share:
            return None
        shares = sorted(by_share)  # the first result is that of DP rank 0
        return self._partition.collect([by_share[share] for share in shares], shares)

    def busy(self, results: Sequence[SplitResult]) -> list[float | None]:
        """Return the busy seconds of each rank, in order."""
        seconds: dict[int, float | None] = {}
        for target, result in zip(self._targets, results, strict=True):
            seconds |= zip(target.ranks, result.busy_s, strict=True)
        return [seconds[rank] for rank in sorted(seconds)]

    def _arguments(self, mark: VerbMark, args: Sequence[Any]) -> list[list[Any]]:
        """Return the arguments of each target: its rows of batches, and all others.

        Targets with the same rows read one copy; the rows of one target travel with the call.
        """
        receivers = Counter(target.share for target in self._targets)
        shares = list(receivers)
        by_share: list[dict[tuple[int, ...], Any]] = []
        for arg in args:
            if isinstance(arg, DataProto):
                payloads = payloads_of(self._partition.split(mark.read(arg), StoredChunk.write, shares))
                pairs = zip(shares, payloads, strict=True)
                by_share.append({share: ray.put(part) if receivers[share] > 1 else part for share, part in pairs})
            else:
                by_share.append(dict.fromkeys(shares, arg))
        return [[column[target.share] for column in by_share] for target in self._targets]


class RowFunctionCall:
    """One call of a row function on the owners of rows.

    Args:
        partition: rows of the first owners, of as many as have rows.
    """

    def __init__(self, partition: Partition, targets: Sequence[CallTarget]) -> None:
        mapped = range(len(partition.rows))
        owning = [replace(target, owned=tuple(dp for dp in target.owned if dp in mapped)) for target in targets]
        self._partition, self._targets = partition, [target for target in owning if target.owned]
        self._shares = [target.owned for target in self._targets]
        self._started: list[StartedCall] = []

    def start(self, function: RowFunction, batch: DataProto, args: Sequence[Any]) -> list[WorkerCall]:
        """Start the function on the targets that have rows."""
        parts = payloads_of(self._partition.split(batch, StoredChunk.write, self._shares))
        self._started = [
            target.map_rows(function, self._partition, part, args)
            for target, part in zip(self._targets, parts, strict=True)
        ]
        return [one.call for one in self._started]

    def collect(self, results: Sequence[MappedRows]) -> tuple[DataProto, list[Any]]:
        """Return the columns in the batch's order, and the facts of each owner."""
        columns = [attached(result.columns, one.chunk) for result, one in zip(results, self._started, strict=True)]
        facts: dict[int, Any] = {}
        for owned, result in zip(self._shares, results, strict=True):
            facts |= zip(owned, result.facts, strict=True)
        return self._partition.collect(columns, self._shares), [facts[dp] for dp in sorted(facts)]
