"""Where metrics go: the contract of a tracker, and the registry."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megarl.errors import ConfigError
from megarl.own_module import load_class
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
        run_id: 20 letters and digits that name the run in trackers; a run that continues has that of the one before.
        timeout_s: seconds that a tracker in a process of its own may take for a call, and to send what is outstanding
            when the run ends.
        logs: folder for what trackers in processes of their own print; None = it is not kept.
    """

    project: str
    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None
    console: Console | None = None
    run_id: str = ""
    timeout_s: float = 60.0
    logs: Path | None = None


class Tracker(ABC):
    """Takes note of a run's metrics; made as ``cls(run)``.

    Attributes:
        apart: whether it works in a process of its own (:mod:`megarl.tracking.apart`), as one must that talks to the
            network: it may then take its time, raise, hang, or die, and the run goes on.
        package: the optional package that it needs, None where it needs none.
    """

    apart: ClassVar[bool] = False
    package: ClassVar[str | None] = None

    @classmethod  # noqa: B027 -- optional
    def check(cls) -> None:
        """Look at what can be known without the network, such as whether there is a login.

        Raises:
            ConfigError: the tracker cannot work as the user has set it up.
        """

    def leftover(self) -> str:
        """What to do about what could not be sent in time; empty where nothing can be done."""
        return ""

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


def find_tracker(name: str) -> TrackerFactory:
    """The tracker that an entry of ``trainer.logger`` names: a registered one, or a class of one's own.

    Args:
        name: of the registry, or ``path.py:Class`` or ``package.module.Class``.

    Raises:
        ConfigError: there is none (the registered ones are listed), or importing it fails.
    """
    if name in TRACKERS:
        return TRACKERS[name]
    if ":" not in name and "." not in name:
        known = ", ".join(sorted(TRACKERS))
        raise ConfigError(f"trainer.logger={name!r} is not known; known are {known}, or path.py:Class of your own")
    return load_class(name, Tracker, "trainer.logger")  # type: ignore[type-abstract]


def check_package(tracker: str, package: str) -> None:
    """Look for a tracker's optional package, without importing it.

    Raises:
        ConfigError: it is not installed; the message names the extra that brings it.
    """
    if importlib.util.find_spec(package) is None:
        wanted = f"megarl[{tracker}]" if tracker in TRACKERS else package
        raise ConfigError(
            f"trainer.logger={tracker!r} needs the package {package!r}, which is not installed: "
            f"install it with `pip install '{wanted}'`, or take {tracker!r} out of trainer.logger"
        )


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that cannot be had, before anything is started.

    Raises:
        ConfigError: there is no such tracker, or its package is not installed.
    """
    for name, factory in {name: find_tracker(name) for name in names}.items():
        package = getattr(factory, "package", None)
        if package is not None:
            check_package(name, package)
