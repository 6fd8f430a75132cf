"""Configuration: the typed schema, its validation and its batch-size arithmetic. The YAML lives in ``configs/``."""

from megarl.config.batch import BatchPlan, plan_batches, render_plan
from megarl.config.build import build
from megarl.config.data import DataConfig
from megarl.config.evaluate_schema import EvaluateConfig
from megarl.config.generate_schema import GenerateConfig
from megarl.config.learners import ActorConfig, CriticConfig
from megarl.config.parts import (
    LogProbBatchConfig,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    RunConfig,
    UpdateBatchConfig,
)
from megarl.config.reward_model_schema import RewardTrainingConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.schema import AnswersConfig, ScoredConfig, TrainConfig, TrainerConfig
from megarl.config.sft_schema import SFTConfig
from megarl.config.supervised import SupervisedConfig

__all__ = [
    "ActorConfig",
    "AnswersConfig",
    "BatchPlan",
    "CriticConfig",
    "DataConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "LogProbBatchConfig",
    "MegatronConfig",
    "ModelPathConfig",
    "OptimConfig",
    "RewardTrainingConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "ScoredConfig",
    "SupervisedConfig",
    "TrainConfig",
    "TrainerConfig",
    "UpdateBatchConfig",
    "build",
    "plan_batches",
    "render_plan",
]
