"""Conversations in flight on the rollout replicas: opened by the first submission, closed after the last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

from megarl.agents.types import ConversationGroup, ConversationService, FinishedSample, SampleId
from megarl.rollout.router import Replica
from megarl.rollout.router_stats import RouterStats

WAIT_S = 1.0
"""Timeout of one wait for finished samples, in seconds; callers wait again."""


class RolloutTraffic:
    """Shares the agent runners between training and validation.

    Groups have unique numbers, so that each caller receives its own samples.

    Args:
        runners: lead the conversations.
        replicas: returns the current rollout replicas by number, since they may be replaced, join and leave.
    """

    def __init__(self, runners: ConversationService, replicas: Callable[[], Mapping[int, Replica]]) -> None:
        self.runners = runners
        self.replicas = replicas
        self.is_open = False
        self._others: list[FinishedSample] = []
        self._served: Mapping[int, Replica] = {}

    def submit(self, groups: Sequence[ConversationGroup]) -> None:
        """Start conversations."""
        if not self.is_open:
            self._served = self.replicas()
            self.runners.open(self._served)
            self.is_open = True
        self.runners.submit(groups)

    def update_replicas(self) -> None:
        """Send changed replicas to the conversations in flight; see :meth:`ConversationService.set_replicas`."""
        replicas = self.replicas()
        if self.is_open and replicas != self._served:
            self.runners.set_replicas(replicas)
            self._served = replicas

    def finished(self, wait_s: float, names: Collection[SampleId] | None = None) -> list[FinishedSample]:
        """Return samples that have ended; wait for the first one, at most ``wait_s`` seconds.

        Args:
            wait_s: see :meth:`ConversationService.finished`.
            names: the samples of the caller; others are kept for a call without names. None = all.

        Raises:
            MegarlError: no conversation can go on; none is in flight any more.
        """
        if names is None and self._others:
            wait_s = 0.0
        try:
            ended = self.runners.finished(wait_s)
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the cause
                self.close()
            raise
        if names is None:
            ended, self._others = [*self._others, *ended], []
            return ended
        self._others += [sample for sample in ended if sample.name not in names]
        return [sample for sample in ended if sample.name in names]

    def take_stats(self) -> RouterStats:
        """Return the statistics since the last call or the opening; conversations go on."""
        return self.runners.take_stats()

    def close(self) -> RouterStats:
        """Abort the conversations in flight; when it returns, no replica has a request."""
        self.is_open, self._others = False, []
        return self.runners.close()
