"""Conversations in flight on the rollout replicas: opened with the first, closed when none is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

from megarl.agents.types import ConversationGroup, ConversationService, FinishedSample, SampleId
from megarl.rollout.router import Replica, RouterStats

WAIT_S = 1.0
"""Seconds to wait for finished samples, after which the wait begins again."""


class RolloutTraffic:
    """Leads conversations of training and validation at the same time, over weight syncs.

    Groups are told apart by their numbers. While conversations are in flight, the engines can be paused; the
    conversations then continue with the next weights.

    Args:
        runners: lead the conversations.
        replicas: returns the current rollout replicas, since lost ones are replaced.
        pause: pauses all engines; requests are held.
        resume: resumes all engines.
    """

    def __init__(
        self,
        runners: ConversationService,
        replicas: Callable[[], Sequence[Replica]],
        pause: Callable[[], None] = lambda: None,
        resume: Callable[[], None] = lambda: None,
    ) -> None:
        self.runners = runners
        self.replicas = replicas
        self.is_open = False
        self._pause, self._resume = pause, resume
        self._is_paused = False
        self._aside: list[FinishedSample] = []

    def submit(self, groups: Sequence[ConversationGroup]) -> None:
        """Start conversations, and go on with paused ones."""
        self.resume()
        if not self.is_open:
            self.runners.open(self.replicas())
            self.is_open = True
        self.runners.submit(groups)

    def finished(self, wait_s: float, names: Collection[SampleId] | None = None) -> list[FinishedSample]:
        """Return samples that have ended; wait for the first one, at most ``wait_s`` seconds.

        Args:
            wait_s: see :meth:`ConversationService.finished`.
            names: the samples of the caller; others are put aside for a call without names. None = all.

        Raises:
            MegarlError: no conversation can go on; none is in flight any more.
        """
        if names is None and self._aside:
            wait_s = 0.0
        try:
            ended = self.runners.finished(wait_s)
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the cause
                self.close()
            raise
        if names is None:
            ended, self._aside = [*self._aside, *ended], []
            return ended
        self._aside += [sample for sample in ended if sample.name not in names]
        return [sample for sample in ended if sample.name in names]

    def pause(self) -> None:
        """Pause the engines, so that their weights can be replaced while conversations are in flight."""
        if not self._is_paused:
            self._pause()
            self._is_paused = True

    def resume(self) -> None:
        """Resume paused engines."""
        if self._is_paused:
            self._resume()
            self._is_paused = False

    def close(self) -> RouterStats:
        """Abort the conversations in flight; when it returns, no replica has a request."""
        self.is_open, self._aside = False, []
        return self.runners.close()
