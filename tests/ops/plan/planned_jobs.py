"""Jobs of real models, from their ``config.json`` only."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.compose import ConfigRequest, compose
from megarl.config.problems import InvalidConfigError
from megarl.ops.plan.job import PlannedJob, planned_job
from megarl.ops.plan.layout_choice import AutomaticLayout

MODELS = Path(__file__).parent / "models"

OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


def megatron(tp: int = 1, pp: int = 1, **others: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **others}


def train_config(
    model: str,
    actor: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    nodes: int = 1,
    devices: int = 8,
    **sections: Any,
) -> TrainConfig:
    """Return a configuration of PPO with a critic, or of GRPO without one; ``sections`` are merged by their paths."""
    values: dict[str, Any] = {
        "data": {
            "train_files": ["x.parquet"],
            "train_batch_size": 64,
            "max_prompt_length": 1024,
            "max_response_length": 1024,
        },
        "actor_rollout_ref": {
            "model": {"path": str(MODELS / model)},
            "actor": {"ppo_mini_batch_size": 32, "megatron": actor or {}},
            "rollout": {"name": "sglang", "n": 1 if critic is not None else 2},
        },
        "algorithm": {"adv_estimator": "grpo" if critic is None else "gae"},
        "trainer": {"nnodes": nodes, "n_gpus_per_node": devices, "experiment_name": "planned", "device": "cuda"},
    }
    if critic is not None:
        values["critic"] = {"megatron": critic}
    for path, value in sections.items():
        *parents, last = path.split("__")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return build(TrainConfig, values)


def train_job(*args: Any, **sections: Any) -> PlannedJob:
    return planned_job(train_config(*args, **sections))


def draft(requested: ConfigRequest[Any]) -> Any:
    """Return the configuration from which ``layout=auto`` chooses: its layouts and batches may not divide."""
    built = []

    def choose(build: Any, _: frozenset[str]) -> AutomaticLayout:
        built.append(build({}))
        return AutomaticLayout((), None)

    with suppress(InvalidConfigError):
        compose(replace(requested, overrides=(*requested.overrides, "layout=auto")), choose)
    return built[0]
