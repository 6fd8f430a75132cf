"""Where metrics go: the contract of a tracker, the registry, and the fan-out over several."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import ConfigError
from megarl.tracking.console import Console


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may want to know of the run.

    Attributes:
        project: project under which runs are filed.
        name: name of the run.
        folder: folder of the run's files.
        config: the resolved config, plain nested dicts and lists.
        resumed_step: last step of the checkpoint that the run continues from; None where it starts anew.
        console: the run's console, for the tracker that prints.
    """

    project: str
    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None
    console: Console | None = None


class Tracker(ABC):
    """Takes note of a run's metrics."""

    @abstractmethod
    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of a step (0 = before training). One step may be logged in several parts."""

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:  # noqa: B027 -- optional
        """Record some answers (``input``, ``output``, ``gts``, ``score``); a tracker need not."""

    def finish(self) -> None:  # noqa: B027 -- optional
        """Write what is outstanding; nothing is logged after it."""


TrackerFactory = Callable[[RunInfo], Tracker]
TRACKERS: dict[str, TrackerFactory] = {}


def register_tracker(name: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorator that files a tracker class or factory under ``name``."""

    def add(factory: TrackerFactory) -> TrackerFactory:
        """File the factory."""
        TRACKERS[name] = factory
        return factory

    return add


def load_package(module: str, tracker: str) -> ModuleType:
    """Import a tracker's optional package.

    Raises:
        ConfigError: it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger={tracker!r} needs the package {module!r}, which cannot be imported ({error}): "
            f"install it with `pip install 'megarl[{tracker}]'`, or take {tracker!r} out of trainer.logger"
        ) from error


class Trackers(Tracker):
    """Several trackers as one.

    Args:
        trackers: each receives every call, in this order.
    """

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.trackers = list(trackers)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics with every tracker."""
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record answers with every tracker."""
        for tracker in self.trackers:
            tracker.log_samples(samples, step)

    def finish(self) -> None:
        """Finish every tracker, also where one of them raises."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.finish)


def open_trackers(names: Sequence[str], run: RunInfo) -> Trackers:
    """The trackers of ``trainer.logger``, ready to log.

    Raises:
        ConfigError: a name is not known (the known ones are listed), or a tracker's package is not installed.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(f"trainer.logger={unknown[0]!r} is not known; known are {', '.join(sorted(TRACKERS))}")
    trackers = Trackers([])
    try:
        for name in names:
            trackers.trackers.append(TRACKERS[name](run))
    except BaseException:
        trackers.finish()
        raise
    return trackers
