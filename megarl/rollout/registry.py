"""The registry of rollout engines: engines by name, their model checks, and their construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from megarl.base.errors import ConfigError
from megarl.base.registry import Registry
from megarl.config.schema.rollout import QUANTIZATION_KEY, SUPPORT_KEY
from megarl.models import ModelConfig
from megarl.rollout.interface import EngineOptions, RolloutEngine

EngineFactory = Callable[[str, EngineOptions], RolloutEngine]
"""Builds an engine from a model folder and options."""

ModelCheck = Callable[[ModelConfig, EngineOptions], None]
"""Raises ModelError for a model that an engine does not support with these options."""

_Factory = TypeVar("_Factory", bound=EngineFactory)


class EngineEntry(NamedTuple):
    """A registered engine.

    Attributes:
        vocab_multiple: the engine pads the vocabulary to a multiple of this number before it divides the rows.
        returns_routes: the engine supports :attr:`EngineOptions.return_routes`.
        quantizes: the engine supports :attr:`EngineOptions.quantization`.
        returns_support: the engine supports :attr:`EngineOptions.return_support`.
    """

    create: EngineFactory
    check: ModelCheck | None
    vocab_multiple: int = 1
    returns_routes: bool = False
    quantizes: bool = False
    returns_support: bool = False


# Imported on first use: only the users of an engine need its dependencies.
ENGINES: Registry[EngineEntry] = Registry(
    "rollout.name", lazy={"embedded": "megarl.rollout.embedded.engine", "sglang": "megarl.rollout.sglang.engine"}
)


def register_engine(
    name: str,
    check: ModelCheck | None = None,
    vocab_multiple: int = 1,
    *,
    returns_routes: bool = False,
    quantizes: bool = False,
    returns_support: bool = False,
) -> Callable[[_Factory], _Factory]:
    """Return a decorator that registers a function of (model folder, options) as an engine.

    Args:
        check: raises ModelError for unsupported models; None = the engine checks the model when it is built.
    """

    def register(factory: _Factory) -> _Factory:
        ENGINES.register(name)(EngineEntry(factory, check, vocab_multiple, returns_routes, quantizes, returns_support))
        return factory

    return register


def create_engine(name: str, model_path: str, options: EngineOptions | None = None) -> RolloutEngine:
    """Build an engine for the model in a folder; it is stale and no weight is read.

    Args:
        model_path: Hugging Face folder; only its configuration is read.

    Raises:
        ConfigError: the name is unknown, or the engine refuses an option.
        ModelError: the folder has no usable ``config.json``.
    """
    return ENGINES[name].create(model_path, options or EngineOptions())


def check_engine_model(name: str, model: ModelConfig, options: EngineOptions) -> None:
    """Check that an engine supports a model, before anything starts.

    Raises:
        ConfigError: the name is unknown, or the engine does not support one of the options.
        ModelError: the engine does not support the model; gives the reason.
    """
    entry = ENGINES[name]
    if options.return_routes and not entry.returns_routes:
        raise ConfigError(
            f"actor_rollout_ref.actor.router_replay.mode=R3 replays routes of the engine, which rollout.name={name} "
            "does not return; set R2",
            code="rollout.routes-unsupported",
        )
    if options.quantization is not None and not entry.quantizes:
        raise ConfigError(
            f"{QUANTIZATION_KEY}={options.quantization} with rollout.name={name}: this engine does not quantize "
            "weights; set null",
            code="rollout.quantization-unsupported",
        )
    if options.return_support and not entry.returns_support:
        raise ConfigError(
            f"{SUPPORT_KEY}.enable=true with rollout.name={name}: this engine does not return the tokens that it "
            "samples from; set false",
            code="rollout.support-unsupported",
        )
    if entry.check is not None:
        entry.check(model, options)


def engine_vocab_multiple(name: str) -> int:
    """Return :attr:`EngineEntry.vocab_multiple`; ConfigError for an unknown name."""
    return ENGINES[name].vocab_multiple
