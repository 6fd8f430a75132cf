"""Configuration: typed schema, checks across sections, batch arithmetic; the YAML files are in ``configs/``.

``schema`` holds one dataclass per section, ``checks`` the rules over several sections, ``verl`` the translation of
verl's keys. :func:`build` makes a complete, checked and frozen configuration; ``compose`` adds files and overrides.
"""

from megarl.config.batch import BatchPlan, plan_batches, render_plan
from megarl.config.build import build
from megarl.config.schema.data import DataConfig
from megarl.config.schema.jobs import (
    EvaluateConfig,
    GenerateConfig,
    GenerationJobConfig,
    PairTrainingConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    ScoredJobConfig,
    SFTConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.schema.model import (
    AdapterKeys,
    LogProbBatchConfig,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    UpdateBatchConfig,
)
from megarl.config.schema.roles import ActorConfig, CriticConfig
from megarl.config.schema.rollout import RolloutConfig
from megarl.config.schema.run import RunConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "AdapterKeys",
    "BatchPlan",
    "CriticConfig",
    "DataConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "GenerationJobConfig",
    "LogProbBatchConfig",
    "MegatronConfig",
    "ModelPathConfig",
    "OptimConfig",
    "PairTrainingConfig",
    "PreferenceConfig",
    "RewardTrainingConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "ScoredJobConfig",
    "SupervisedConfig",
    "TrainConfig",
    "TrainerConfig",
    "UpdateBatchConfig",
    "build",
    "plan_batches",
    "render_plan",
]
