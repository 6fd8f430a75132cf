"""Errors that a user can act on. Every message names the field, its value, and what would be right."""


class MegarlError(Exception):
    """Base of all errors raised on purpose; the command line prints it without a traceback."""


class StallError(MegarlError):
    """A phase outlasted its limit; carries who waits for whom."""


class StepImpossible(MegarlError):
    """The training step under way cannot be done; what was learned until then is saved, and the run ends."""


class ConfigError(MegarlError):
    """A configuration key is unknown, has a wrong type or value, or contradicts another."""


class ModelError(MegarlError):
    """A model folder is missing, incomplete, or of an architecture without a weight map."""


class DataError(MegarlError):
    """A data file, a row, or a batch is malformed."""


class RewardError(MegarlError):
    """A reward function raised, or returned something that is not a number."""


class RewardFunctionError(RewardError, ConfigError):
    """A reward function is not there, cannot be imported, or does not take what it is called with."""


class ResourceError(MegarlError):
    """The cluster does not have the devices the configured pools need."""


class CheckpointError(MegarlError):
    """A checkpoint is missing, corrupt, incomplete, or of another model."""


class WeightSyncError(MegarlError):
    """Weights did not arrive in the rollout engine exactly once, whole, and equal."""


class WorkerError(MegarlError):
    """A worker process raised or died; carries role, rank, verb and the remote traceback."""


class WorkerLost(MegarlError):
    """What a worker holds is lost, such as processes that it had started: only a new worker can go on."""
