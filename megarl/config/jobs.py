"""The kinds of jobs."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from megarl.config.evaluate_schema import EvaluateConfig
from megarl.config.generate_schema import GenerateConfig
from megarl.config.schema import TrainConfig
from megarl.config.supervised import SupervisedConfig

JobConfig: TypeAlias = TrainConfig | SupervisedConfig | EvaluateConfig | GenerateConfig
JobT = TypeVar("JobT", bound=JobConfig)
