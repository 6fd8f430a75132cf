"""Errors that a user can act on; each message names the config key, its value, and the remedy."""

from __future__ import annotations

import copyreg
from typing import Any


class MegarlError(Exception):
    """Base class of megarl's errors; the command line prints them without a traceback.

    Attributes:
        text: the message without its code, for use inside another message.
        code: stable name of the problem, such as ``layout.tp-heads``. It ends the printed message;
            ``docs/reference/errors.md`` lists all codes.
    """

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.text, self.code = text, code

    def __str__(self) -> str:
        return f"{self.text} [{self.code}]" if self.code else self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class StallError(MegarlError):
    """A phase exceeded its time limit; the message names the processes that wait and the ones they wait for."""


class TeacherError(MegarlError):
    """The server of a teacher fails, refuses a request, or has another vocabulary than the policy."""


class StepImpossible(MegarlError):
    """The current training step is impossible; the trainer saves a checkpoint and ends the run."""


class ConfigError(MegarlError):
    """A config key is unknown, has a wrong type or value, or contradicts another key."""


class ModelError(MegarlError):
    """A model folder is missing or incomplete, or its architecture has no weight map."""


class DataError(MegarlError):
    """A data file, a row, or a batch is malformed."""


class RewardError(MegarlError):
    """A reward function raised an exception or returned no number."""


class RewardFunctionError(RewardError, ConfigError):
    """A reward function is missing, cannot be imported, or has a wrong signature."""


class ResourceError(MegarlError):
    """The cluster has too few devices for the configured resource pools."""


class CheckpointError(MegarlError):
    """A checkpoint is missing, corrupt, incomplete, or belongs to another model."""


class ExportError(MegarlError):
    """An export cannot be written, for example since the disk is full; a worker reports it without a traceback."""


class WeightSyncError(MegarlError):
    """A weight sync did not deliver every weight exactly once, complete and unchanged."""


class WorkerError(MegarlError):
    """A worker process raised or died; the message has role, rank, verb and the remote traceback."""


class RayLost(MegarlError):
    """The run's GCS or raylet died; the message has the newest checkpoint and the command to resume."""


class WorkerLost(MegarlError):
    """The state of a worker is lost, such as processes that it started; only a new worker can continue."""
