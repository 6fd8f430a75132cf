"""Schema of the supervised fine-tuning job, ``python -m megarl.sft``: the one source of its keys and defaults."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.keys import key, section
from megarl.config.parts import DataSourceConfig, MegatronConfig, ModelPathConfig, OptimConfig, TrainingRunConfig
from megarl.config.saving import CheckpointConfig


@dataclass
class SFTDataConfig(DataSourceConfig):
    """Prompts with their responses. `train_batch_size` counts samples per optimizer step."""

    response_key: str = key(
        "response",
        "Column that holds the response: a text, or pieces `{role, content}` of which the assistant's are learned.",
    )
    max_length: int = key(1024, "Longest sample (prompt and response), in tokens.", at_least=1)
    use_dynamic_bsz: bool = key(True, "Fill micro-batches up to `max_token_len_per_gpu` tokens.")
    max_token_len_per_gpu: int = key(
        16384, "Tokens per micro-batch and device; read with `use_dynamic_bsz`.", at_least=1
    )
    micro_batch_size_per_gpu: int | None = key(
        None, "Samples per micro-batch and data-parallel rank; required without `use_dynamic_bsz`.", at_least=1
    )


@dataclass
class SFTRunConfig(TrainingRunConfig):
    """The run: length, devices, checkpoints and records."""

    max_ckpt_to_keep: int | None = key(None, "Newest checkpoints to keep; null = all.", at_least=1)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    target_accuracy: float | None = key(
        None,
        "Stop early once `train/accuracy`, the share of responses that greedy decoding would give word for word, "
        "averaged over the last 10 steps, is up here; null = never.",
        above=0,
        at_most=1,
    )


@dataclass
class SFTConfig:
    """Supervised fine-tuning through the same Megatron workers."""

    data: SFTDataConfig = section(SFTDataConfig)
    model: ModelPathConfig = section(ModelPathConfig)
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    megatron: MegatronConfig = section(MegatronConfig)
    trainer: SFTRunConfig = section(SFTRunConfig)
