"""The interface of experiment trackers, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megarl.base.errors import ConfigError
from megarl.base.packages import is_installed
from megarl.base.provenance import install_command
from megarl.base.registry import Registry
from megarl.base.user_code import load_user_class
from megarl.tracking.console import Console


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for its trackers.

    Attributes:
        config: the resolved config, plain nested dicts and lists.
        resumed_step: last step of the checkpoint that the run resumes from; None for a new run.
        run_id: 20 letters and digits that identify the run in trackers; a resumed run keeps its ID.
        timeout_s: seconds that a tracker in a subprocess may take for one call, and to send its queue at the end.
        logs: folder for the output of tracker subprocesses; None = discard it.
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
    """Base class of trackers, which record the metrics of a run; created as ``cls(run)``.

    Attributes:
        in_subprocess: run the tracker in a subprocess (:mod:`megarl.tracking.subprocess_tracker`). Set it if the
            tracker uses the network: it may then be slow, raise, hang or die, and the run continues.
        package: optional package that the tracker needs; None = none.
    """

    in_subprocess: ClassVar[bool] = False
    package: ClassVar[str | None] = None

    @classmethod  # noqa: B027 -- optional
    def check(cls) -> None:
        """Check the setup without using the network, such as the presence of a login.

        Raises:
            ConfigError: the setup is wrong.
        """

    def leftover(self) -> str:
        """Describe the remedy for records that were not sent in time; empty if there is none."""
        return ""

    @abstractmethod
    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of a step (0 = before training). A step may be logged in several parts."""

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:  # noqa: B027 -- optional
        """Record some samples (``input``, ``output``, ``gts``, ``score``); optional."""

    def finish(self) -> None:  # noqa: B027 -- optional
        """Write or send everything; it is the last call."""


TrackerFactory = Callable[[RunInfo], Tracker]
TRACKERS: Registry[TrackerFactory] = Registry(
    "trainer.logger",
    defaults="megarl.tracking.backends",
    loader=lambda spec, key: load_user_class(spec, Tracker, key),
    hint="or write path.py:Class for a custom tracker",
)
register_tracker = TRACKERS.register


def _check_package(tracker: str, package: str) -> None:
    """Check that a tracker's optional package is installed, without importing it."""
    if not is_installed(package):
        command = install_command(tracker) if tracker in TRACKERS else f"pip install '{package}'"
        raise ConfigError(
            f"trainer.logger={tracker!r} needs the package {package!r}, which is not installed: "
            f"install it ({command}), or remove {tracker!r} from trainer.logger",
            code="tracking.no-package",
        )


def check_trackers(names: Sequence[str]) -> None:
    """Check that all trackers are known, their packages installed and their setup right, before a job starts.

    Raises:
        ConfigError: a tracker is unknown, its package is missing or cannot be imported, its setup is wrong, such as a
            missing login, or it has the attribute of an earlier release.
    """
    for name, factory in {name: TRACKERS.find(name) for name in names}.items():
        if hasattr(factory, "apart"):
            raise ConfigError(
                f"trainer.logger={name!r}: rename the attribute `apart` of the class to `in_subprocess`",
                code="tracking.old-attribute",
            )
        package = getattr(factory, "package", None)
        if package is not None:
            _check_package(name, package)
        if isinstance(factory, type) and issubclass(factory, Tracker):
            try:
                factory.check()
            except ImportError as error:
                raise ConfigError(
                    f"trainer.logger={name!r}: the package {package!r} cannot be imported: {error}",
                    code="tracking.broken-package",
                ) from error
