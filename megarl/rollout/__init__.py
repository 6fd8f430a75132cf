"""Rollout: the engine contract, the engines, and the router over their replicas.

``interface`` is the contract. ``registry`` creates engines by name, ``embedded`` is the engine in plain torch, and
``sglang`` runs SGLang. ``router`` sends requests to replicas in the order of ``request_scheduler``.
"""

from megarl.rollout.interface import (
    NO_VERSION,
    TAGS,
    Completion,
    EngineOptions,
    Request,
    RequestRefused,
    RolloutEngine,
    RolloutError,
    SamplingParams,
)
from megarl.rollout.registry import check_engine_model, create_engine, register_engine

__all__ = [
    "NO_VERSION",
    "TAGS",
    "Completion",
    "EngineOptions",
    "Request",
    "RequestRefused",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "check_engine_model",
    "create_engine",
    "register_engine",
]
