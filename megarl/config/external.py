"""Modules of the user's own that a run imports first, in every process."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.jobs import JobConfig
from megarl.config.problems import Problem
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ConfigError
from megarl.own_module import import_own


def external_problems(config: JobConfig) -> Iterator[Problem]:
    """Imports the modules of ``external_lib`` into this process; a problem for each that cannot be."""
    supervised = isinstance(config, SupervisedConfig)
    path = "model.external_lib" if supervised else "actor_rollout_ref.model.external_lib"
    model = config.model if isinstance(config, SupervisedConfig) else config.actor_rollout_ref.model
    for spec in model.own_modules:
        try:
            import_own(spec)
        except ConfigError as error:
            yield Problem(path, spec, str(error))
