"""The judge's model, which its endpoint names unless the configuration does; imports no torch."""

from __future__ import annotations

import asyncio
from typing import cast

from megarl.base.errors import ConfigError
from megarl.config.keys import with_values
from megarl.config.schema.jobs import JobT, ScoredJobConfig
from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.rules.judge import served_models

_KEY = "reward.judge"
_TIMEOUT_S = 30.0
"""Seconds in which an endpoint lists its models, which needs no generation."""


def with_served_judge(config: JobT) -> JobT:
    """Fill the name of the judge's model with the only one that its endpoint serves, unless it is set.

    Raises:
        ConfigError: the endpoint does not answer, or serves several models.
    """
    if not isinstance(config, ScoredJobConfig):
        return config
    keys = config.reward
    judge = keys.judge
    if judge.model is not None or judge.base_url is None or not (keys.name == "judge" or "judge" in keys.functions):
        return cast(JobT, config)
    try:
        names = asyncio.run(served_models(judge.base_url, min(_TIMEOUT_S, judge.timeout_s), judge.api_key_env))
    except (InfrastructureFailure, ValueError) as error:
        raise ConfigError(
            f"{_KEY}.base_url={judge.base_url}: {error}. Start the server first, or correct the address, which ends "
            f"before /chat/completions; {_KEY}.model names a model without asking",
            code="judge.no-answer",
        ) from error
    if len(names) > 1:
        raise ConfigError(
            f"{_KEY}.base_url={judge.base_url} serves {', '.join(names)}; set {_KEY}.model to one of them",
            code="judge.several-models",
        )
    return cast(JobT, with_values(config, {f"{_KEY}.model": names[0]}))
