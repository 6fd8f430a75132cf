"""Schema of the generation job, ``python -m megarl.generate``: the keys of evaluation, without a reward."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.data import PromptsConfig
from megarl.config.keys import key, section
from megarl.config.parts import RunConfig
from megarl.config.schema import AnswersConfig

STANDARD_INPUT = "-"


@dataclass
class AskedConfig(PromptsConfig):
    """Prompts: files, texts, or lines of the standard input."""

    prompts: list[str] = key(
        [], "Texts, each asked as a user's message; [-] = the lines of the standard input. They come after `val_files`."
    )
    output_path: str | None = key(
        None, "File for the answers, .jsonl or .parquet; null = `answers.jsonl` in the run's folder."
    )


@dataclass
class GenerateConfig(AnswersConfig):
    """Answers of a policy, without scores.

    `actor_rollout_ref.model.path` may also be a checkpoint. Sampling is that of `actor_rollout_ref.rollout.val_kwargs`,
    as in evaluation. Nothing is tracked: `trainer.logger` and `trainer.project_name` take no effect here.
    """

    data: AskedConfig = section(AskedConfig)
    trainer: RunConfig = section(RunConfig)
