"""The Ray driver: the phase loop, validation, run state and metrics."""
