"""Configuration: the typed schema, its validation and its batch-size arithmetic. The YAML lives in ``configs/``."""

from megarl.config.parts import (
    LogProbBatchConfig,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    RunConfig,
    UpdateBatchConfig,
)
from megarl.config.schema import ActorConfig, CriticConfig, DataConfig, RolloutConfig, TrainConfig, TrainerConfig
from megarl.config.sft_schema import SFTConfig

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "DataConfig",
    "LogProbBatchConfig",
    "MegatronConfig",
    "ModelPathConfig",
    "OptimConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "TrainConfig",
    "TrainerConfig",
    "UpdateBatchConfig",
]
