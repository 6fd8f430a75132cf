"""Which rollout engines exist: a decorator and a dict."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

from megarl.errors import ConfigError
from megarl.models import ModelConfig
from megarl.rollout.interface import EngineOptions, RolloutEngine

EngineFactory = Callable[[str, EngineOptions], RolloutEngine]
ModelCheck = Callable[[ModelConfig, EngineOptions], None]
"""Raises ModelError for a model that an engine does not run with these options."""
_Factory = TypeVar("_Factory", bound=EngineFactory)

_FACTORIES: dict[str, EngineFactory] = {}
_CHECKS: dict[str, ModelCheck] = {}
# Imported on demand: an engine's own dependencies are needed only by those who use it.
_BUILT_IN = {"embedded": "megarl.rollout.embedded.engine", "sglang": "megarl.rollout.sglang.engine"}


def register_engine(name: str, check: ModelCheck | None = None) -> Callable[[_Factory], _Factory]:
    """Decorator: makes ``create_engine(name, ...)`` call a function of (model folder, options).

    Args:
        name: of the engine.
        check: tells which models it runs; None = it says so itself when it is built.
    """

    def register(factory: _Factory) -> _Factory:
        _FACTORIES[name] = factory
        if check is not None:
            _CHECKS[name] = check
        return factory

    return register


def known_engines() -> list[str]:
    """Names that :func:`create_engine` accepts, sorted."""
    return sorted({*_FACTORIES, *_BUILT_IN})


def create_engine(name: str, model_path: str, options: EngineOptions | None = None) -> RolloutEngine:
    """Builds an engine for the model in a folder; it is stale, no weight is read.

    Args:
        name: a registered engine.
        model_path: Hugging Face folder; only its configuration is read.
        options: default :class:`EngineOptions`.

    Raises:
        ConfigError: unknown name (the known ones are listed), or an option that the engine refuses.
        ModelError: the folder has no usable ``config.json``.
    """
    return _find(name)(model_path, options or EngineOptions())


def check_engine_model(name: str, model: ModelConfig, options: EngineOptions) -> None:
    """Makes sure, before anything starts, that an engine runs a model.

    Args:
        name: a registered engine.
        model: the model.
        options: that the engine is to be built with.

    Raises:
        ConfigError: unknown name (the known ones are listed).
        ModelError: the engine does not run such a model; says why.
    """
    _find(name)
    if name in _CHECKS:
        _CHECKS[name](model, options)


def _find(name: str) -> EngineFactory:
    if name not in _FACTORIES and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _FACTORIES:
        raise ConfigError(f"rollout engine '{name}' is unknown; known ones: {', '.join(known_engines())}")
    return _FACTORIES[name]
