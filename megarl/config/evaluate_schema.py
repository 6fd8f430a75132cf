"""Schema of the evaluation job, ``python -m megarl.evaluate``: the keys of training that answers depend on."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.keys import key, section
from megarl.config.parts import RunConfig
from megarl.config.schema import ScoredConfig, ValidationRecordsConfig


@dataclass
class EvaluateRunConfig(ValidationRecordsConfig, RunConfig):
    """The run: devices and records."""

    validation_data_dir: str | None = key(
        None, "Folder for the answers as `<step>.jsonl`; null = `answers/` in the run's folder."
    )


@dataclass
class BestAnswersConfig:
    """Rejection sampling: the best answers as data that `megarl sft` learns from."""

    file: str | None = key(None, "Parquet file for them, with `prompt` and `response`; null = none.")
    keep: int = key(1, "Answers per prompt, at most; see `actor_rollout_ref.rollout.val_kwargs.n`.", at_least=1)
    min_score: float | None = key(None, "Leave out what scores less; null = nothing is left out.")


@dataclass
class EvaluateConfig(ScoredConfig):
    """Answers, scores and metrics of a policy that does not change, as validation in training has them.

    `actor_rollout_ref.model.path` may also be a checkpoint. Sampling is that of `actor_rollout_ref.rollout.val_kwargs`;
    the sampling keys beside it, and `log_prob_*`, are training's and take no effect here.
    """

    best_answers: BestAnswersConfig = section(BestAnswersConfig)
    trainer: EvaluateRunConfig = section(EvaluateRunConfig)
