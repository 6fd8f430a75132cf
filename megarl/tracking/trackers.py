"""Several trackers as one: each gets every call in order, and the failure of one is nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.tracking.apart import Courier
from megarl.tracking.tracker import RunInfo, Tracker, check_trackers, find_tracker

logger = logging.getLogger(__name__)


class Guarded(Tracker):
    """A tracker of this process whose failures are told once, counted, and hold nothing up.

    Args:
        name: of the tracker.
        tracker: the tracker itself.
        tell: takes the lines that the user is to see.
    """

    def __init__(self, name: str, tracker: Tracker, tell: Callable[[str], None]) -> None:
        self.name, self.tracker = name, tracker
        self.delivered = self.dropped = 0
        self._tell = tell
        self._failing = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics, or count them as dropped."""
        self._try(lambda: self.tracker.log(metrics, step))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record the answers, or count them as dropped."""
        self._try(lambda: self.tracker.log_samples(samples, step))

    def finish(self) -> None:
        """Finish the tracker, and tell what it has not recorded."""
        try:
            self.tracker.finish()
        except Exception as error:
            logger.info("tracker %s", self.name, exc_info=True)
            self._tell(f"tracker {self.name} could not write all: {type(error).__name__}: {error}")
        if self.dropped:
            total = self.delivered + self.dropped
            self._tell(f"tracker {self.name}: {self.dropped} of {total} records were not written")

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.dropped += 1
            logger.info("tracker %s", self.name, exc_info=True)
            if not self._failing:
                self._tell(f"tracker {self.name} fails: {type(error).__name__}: {error}\nThe run goes on")
            self._failing = True
        else:
            self.delivered += 1
            self._failing = False


class Trackers(Tracker):
    """Several trackers as one.

    Args:
        trackers: each receives every call, in this order.
    """

    def __init__(self, trackers: Iterable[Guarded | Courier]) -> None:
        self.trackers = list(trackers)

    @property
    def dropped(self) -> int:
        """Records that some tracker lacks for good."""
        return sum(tracker.dropped for tracker in self.trackers)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics with every tracker; ``tracking/dropped`` among them once that is above 0."""
        told = {"tracking/dropped": float(self.dropped)} if self.dropped else {}
        for tracker in self.trackers:
            tracker.log({**metrics, **told}, step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record answers with every tracker."""
        for tracker in self.trackers:
            tracker.log_samples(samples, step)

    def finish(self) -> None:
        """Finish every tracker; those in processes of their own all at the same time."""
        for tracker in self.trackers:
            if isinstance(tracker, Courier):
                tracker.begin_finish()
        for tracker in reversed(self.trackers):
            tracker.finish()


def open_trackers(names: Sequence[str], run: RunInfo, tell: Callable[[str], None] | None = None) -> Trackers:
    """The trackers of ``trainer.logger``, ready to log.

    Args:
        names: of the trackers, as ``trainer.logger`` has them.
        run: what they are told.
        tell: takes the lines about trackers that fail; by default the run's console, or the log.

    Raises:
        ConfigError: see :func:`check_trackers`, or a tracker's set-up is wrong, for want of a login say.
    """
    check_trackers(names)
    tell = tell or (run.console.warn if run.console else logger.warning)
    trackers = Trackers([])
    try:
        for name in names:
            factory = find_tracker(name)
            if getattr(factory, "apart", False):
                trackers.trackers.append(Courier(name, run, tell))
            else:
                trackers.trackers.append(Guarded(name, factory(run), tell))
        for tracker in trackers.trackers:
            if isinstance(tracker, Courier):
                tracker.wait_checked()
    except BaseException:
        trackers.finish()
        raise
    return trackers
