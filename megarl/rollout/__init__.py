"""Rollout: the engine contract, and engines that fulfil it.

``interface`` is the contract, ``registry`` finds an engine by name, ``embedded`` is the one in plain torch.
"""

from megarl.rollout.interface import (
    NO_VERSION,
    TAGS,
    Completion,
    EngineHealth,
    EngineOptions,
    Request,
    RolloutEngine,
    RolloutError,
    SamplingParams,
)
from megarl.rollout.registry import check_engine_model, create_engine, known_engines, register_engine

__all__ = [
    "NO_VERSION",
    "TAGS",
    "Completion",
    "EngineHealth",
    "EngineOptions",
    "Request",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "check_engine_model",
    "create_engine",
    "known_engines",
    "register_engine",
]
