"""Errors that a user can act on; each message names the config key, its value, and the remedy."""


class MegarlError(Exception):
    """Base class of megarl's errors; the command line prints them without a traceback."""


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
