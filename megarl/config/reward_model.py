"""A reward model beside or in place of the reward function: keys of the `reward_model` section."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.keys import key, section
from megarl.config.layouts import layout_problems
from megarl.config.parts import MegatronConfig
from megarl.config.problems import Problem

if TYPE_CHECKING:
    from megarl.config.schema import ScoredConfig


@dataclass
class RewardModelPathConfig:
    """Where the reward model comes from."""

    path: str | None = key(
        None,
        "Folder of a Hugging Face model with a scalar head (`...ForSequenceClassification`, one label), and of its "
        "tokenizer; required with `reward_model.enable`.",
    )
    input_tokenizer: str | None = key(
        None,
        "Folder of the policy's tokenizer, where the reward model's is another: answers are then decoded with it, and "
        "the conversation is encoded anew with the reward model's own chat template. null = the reward model reads the "
        "token ids of prompt and answer as they are.",
    )


@dataclass
class ScoringModelConfig:
    """A Megatron role that scores whole sequences; inherited by the `reward_model` section."""

    enable: bool = key(False, "Score answers with a reward model; see docs/reward_model.md.")
    model: RewardModelPathConfig = section(RewardModelPathConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    use_dynamic_bsz: bool = key(True, "Fill micro-batches up to `forward_max_token_len_per_gpu` tokens.")
    forward_max_token_len_per_gpu: int = key(
        16384, "Tokens per micro-batch and device; read with `use_dynamic_bsz`.", at_least=1
    )
    micro_batch_size_per_gpu: int | None = key(
        None, "Samples per micro-batch and data-parallel rank; required without `use_dynamic_bsz`.", at_least=1
    )
    max_length: int | None = key(
        None,
        "Longest sequence that the reward model reads, in tokens; a longer one is cut at its left and counted; null = "
        "`data.max_prompt_length` + `data.max_response_length`.",
        at_least=2,
    )
    model_weight: float = key(1.0, "Weight of the reward model's score in the sum.")
    function_weight: float | None = key(
        None,
        "Weight of the reward function's score in the sum; at 0 no function is called. null = 1, or with `enable` and "
        "neither `custom_reward_function.path` nor `functions` 0.",
    )


def fill_reward_model(config: ScoredConfig) -> None:
    """Fills the null keys of the section that follow others; the layout is filled like those of all roles."""
    keys = config.reward_model
    if keys.max_length is None:
        keys.max_length = config.data.max_prompt_length + config.data.max_response_length
    if keys.function_weight is None:
        keys.function_weight = (
            0.0 if keys.enable and not config.custom_reward_function.path and not keys.functions else 1.0
        )


def reward_model_problems(config: ScoredConfig) -> Iterator[Problem]:
    """Combinations of keys about the reward model that cannot work."""
    keys = config.reward_model
    if not keys.enable:
        if keys.function_weight == 0:
            text = "leaves nothing to score with while reward_model.enable=false; leave it null"
            yield Problem.at(config, "reward_model.function_weight", text)
        return
    if not keys.model.path:
        yield Problem.at(config, "reward_model.model.path", "must be set with reward_model.enable=true")
    if keys.model_weight == 0:
        text = "leaves the reward model without effect; set reward_model.enable=false"
        yield Problem.at(config, "reward_model.model_weight", text)
    yield from layout_problems(config, "reward_model.megatron")
