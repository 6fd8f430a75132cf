"""The trackers of a run as one: each receives its calls in order, and a failing tracker affects no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.tracking.jsonl_files import SKIPPED_STEPS_SUFFIX
from megarl.tracking.subprocess_tracker import SubprocessTracker
from megarl.tracking.tracker import TRACKERS, RunInfo, Tracker, check_trackers

logger = logging.getLogger(__name__)

_COMPLETE = "jsonl"
"""The tracker that receives every step: the report, resumed runs and the summary read its file."""
_VALIDATION = ("val-core/", "val-aux/", "val/")


class GuardedTracker(Tracker):
    """A tracker in this process; its failures are reported once, counted, and do not stop the run."""

    def __init__(self, name: str, tracker: Tracker, report: Callable[[str], None]) -> None:
        self.name, self.tracker = name, tracker
        self.delivered = self.dropped = 0
        self._report = report
        self._failing = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics; a failure counts as a dropped record."""
        self._try(lambda: self.tracker.log(metrics, step))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record the samples; a failure counts as a dropped record."""
        self._try(lambda: self.tracker.log_samples(samples, step))

    def finish(self) -> None:
        """Finish the tracker, and report the number of dropped records."""
        try:
            self.tracker.finish()
        except Exception as error:
            logger.info("tracker %s", self.name, exc_info=True)
            self._report(f"tracker {self.name} could not write all: {type(error).__name__}: {error}")
        if self.dropped:
            total = self.delivered + self.dropped
            self._report(f"tracker {self.name}: {self.dropped} of {total} records were not written")

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.dropped += 1
            logger.info("tracker %s", self.name, exc_info=True)
            if not self._failing:
                self._report(f"tracker {self.name} fails: {type(error).__name__}: {error}\nThe run continues")
            self._failing = True
        else:
            self.delivered += 1
            self._failing = False


def _is_always_due(name: str, value: float) -> bool:
    return name.startswith(_VALIDATION) or (name.endswith(SKIPPED_STEPS_SUFFIX) and value > 0)


class Trackers(Tracker):
    """Several trackers as one.

    Args:
        trackers: each receives the calls in this order.
        every: steps between the metrics that trackers other than jsonl receive. They also receive validations,
            steps that skipped an optimizer step, and the last step.
    """

    def __init__(self, trackers: Iterable[GuardedTracker | SubprocessTracker], every: int = 1) -> None:
        self.trackers = list(trackers)
        self.every = every
        self._skipped: tuple[int, dict[str, float]] | None = None

    @property
    def dropped(self) -> int:
        """Number of records that a tracker lost, summed over trackers."""
        return sum(tracker.dropped for tracker in self.trackers)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics, and ``tracking/dropped`` if it is above 0."""
        extra = {"tracking/dropped": float(self.dropped)} if self.dropped else {}
        record = {**metrics, **extra}
        is_due = step % self.every == 0 or any(_is_always_due(name, value) for name, value in metrics.items())
        self._skipped = None if is_due else (step, record)
        for tracker in self.trackers:
            if is_due or tracker.name == _COMPLETE:
                tracker.log(record, step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record samples with every tracker."""
        for tracker in self.trackers:
            tracker.log_samples(samples, step)

    def finish(self) -> None:
        """Record the last step where it was skipped, and finish every tracker; those in subprocesses concurrently."""
        if self._skipped is not None:
            step, record = self._skipped
            for tracker in self.trackers:
                if tracker.name != _COMPLETE:
                    tracker.log(record, step)
        for tracker in self.trackers:
            if isinstance(tracker, SubprocessTracker):
                tracker.begin_finish()
        for tracker in reversed(self.trackers):
            tracker.finish()


def open_trackers(
    names: Sequence[str], run: RunInfo, report: Callable[[str], None] | None = None, every: int = 1
) -> Trackers:
    """Open the trackers of ``trainer.logger``, ready to log.

    Args:
        report: prints a message about a failing tracker; default: the run's console, or the log.

    Raises:
        ConfigError: see :func:`check_trackers`.
    """
    check_trackers(names)
    report = report or (run.console.warn if run.console else logger.warning)
    trackers = Trackers([], every)
    try:
        for name in names:
            factory = TRACKERS.find(name)
            if getattr(factory, "in_subprocess", False):
                trackers.trackers.append(SubprocessTracker(name, run, report))
            else:
                trackers.trackers.append(GuardedTracker(name, factory(run), report))
    except BaseException:
        trackers.finish()
        raise
    return trackers
