"""Hosts that delay a step: their ranks take longer than the ranks of other hosts for the same work."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from megarl.cluster.worker_group import WorkerGroup
from megarl.tracking.jsonl_files import DELAY_PREFIX, RankLists

SLOW = 1.3
"""Seconds per work of a slow host, relative to the other hosts; predicted work is not exact to some ten percent."""
_STEPS, _SHARE = 3, 0.1  # steps in a row, and the share of each, that a host delays until the user is told


def hosts_of_ranks(group: WorkerGroup) -> list[str]:
    """Return the host of each data-parallel rank; several addresses if its processes are on several hosts."""
    hosts: list[set[str]] = [set() for _ in range(group.layout.dp)]
    for rank, info in group.processes.items():
        hosts[group.layout.coordinate(rank).dp].add(info.host)
    return [", ".join(sorted(addresses)) for addresses in hosts]


def host_delays(seconds: Sequence[float], work: Sequence[float], hosts: Sequence[str]) -> dict[str, float]:
    """Return the seconds by which each slow host prolongs a verb.

    Args:
        seconds: busy seconds of the data-parallel ranks in the verb; the ranks wait for the busiest.
        work: their work, in any unit.
        hosts: their hosts, see :func:`hosts_of_ranks`.
    """
    ranks = [rank for rank, amount in enumerate(work) if amount > 0]
    delays = {}
    for host in dict.fromkeys(hosts):
        own = [rank for rank in ranks if hosts[rank] == host]
        others = [rank for rank in ranks if hosts[rank] != host]
        if not own or not others:
            continue
        pace = statistics.median(seconds[rank] / work[rank] for rank in others)
        if sum(seconds[rank] for rank in own) <= SLOW * pace * sum(work[rank] for rank in own):
            continue
        without = max(*(seconds[rank] for rank in others), *(pace * work[rank] for rank in own))
        if (delay := max(seconds[rank] for rank in own) - without) > 0:
            delays[host] = delay
    return delays


class SlowHostWarnings:
    """Describes each host that delays several steps in a row, once."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_STEPS))
        self._told: set[str] = set()

    def sentences(self, lists: RankLists, step_s: float) -> list[str]:
        """Return a sentence per new slow host after a step.

        Args:
            lists: of the step, as in the balance file.
            step_s: seconds of the step.
        """
        delays: Mapping[str, float] = {
            name.removeprefix(DELAY_PREFIX): values[0]
            for name, values in lists.items()
            if name.startswith(DELAY_PREFIX)
        }
        for host in dict.fromkeys([*self._recent, *delays]):
            if delays.get(host, 0.0) > _SHARE * step_s:
                self._recent[host].append((delays[host], step_s))
            else:
                self._recent.pop(host, None)
        slow = [host for host, recent in self._recent.items() if len(recent) == _STEPS and host not in self._told]
        self._told.update(slow)
        return [self._describe(host) for host in slow]

    def _describe(self, host: str) -> str:
        lost, total = (sum(values) for values in zip(*self._recent[host], strict=True))
        return (
            f"{host} is slow: the other ranks waited for it for at least {lost:.1f} s of the last {_STEPS} steps, "
            f"which took {total:.1f} s. Look there for other processes and throttled devices"
        )
