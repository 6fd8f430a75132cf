"""The `data` section: files, prompts, lengths and the order of rows."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import REQUIRED, derived_key, key, section

_SPEC = "path.py or package.module"


@dataclass(frozen=True)
class RowConfig:
    """Conversion of a data row to tokens."""

    prompt_key: str = key("prompt", "Column of the prompt: chat messages, or a text.")
    apply_chat_template: bool = key(
        True,
        "Render a prompt that is a text as one user message by the chat template; false = its tokens as they are, for "
        "base models. Chat messages are always rendered.",
    )
    system_prompt: str | None = key(
        None,
        "System message of rows without one, neither as first message nor in a column `system`; null = none.",
        empty=True,
    )
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Extra arguments for the tokenizer's chat template.")
    filter_overlong_prompts_workers: int | None = derived_key(
        "Processes that count the tokens of rows, for `filter_overlong_prompts` and `truncation: error`; auto = one "
        "per 16,384 rows, at most half of the cores.",
        at_least=1,
    )
    cache_dir: str | None = derived_key(
        "Cache folder for large files as memory-mapped rows, and for the lengths of rows (see docs/how_to/data.md); "
        "auto = `$XDG_CACHE_HOME/megarl/data`, or `~/.cache/megarl/data`.",
    )


@dataclass(frozen=True)
class CurriculumConfig:
    """Curriculum: rows from easy to hard."""

    column: str | None = key(
        None, "Column of numbers, or `column.field`, to sort rows by, lowest first; null = no curriculum."
    )
    epochs: int = key(1, "Epochs in that order; later epochs follow `data.shuffle`.", at_least=1)


@dataclass(frozen=True)
class DataSourceConfig(RowConfig):
    """Training files and the order of their rows."""

    train_files: list[str] = key(
        REQUIRED,
        "Training files: parquet, JSONL, or folders of Hugging Face datasets; glob patterns, `~` and `$NAME` are "
        "expanded (see docs/how_to/data.md); [] with `mixture`.",
    )
    mixture: dict[str, Any] = key(
        {},
        "Data sets to mix, with `train_files: []`: by name, `files` and `weight`, a number, or numbers by step as "
        "`{1: 0.2, 100: 1}`, linear in between.",
    )
    curriculum: CurriculumConfig = section(CurriculumConfig)
    train_batch_size: int = key(1024, "Rows of the data per training step.", at_least=1)
    train_max_samples: int = key(
        -1,
        "Rows to train on, drawn with `seed`, or the first rows without `shuffle`; -1 = all.",
        at_least=1,
        allowed=(-1,),
    )
    shuffle: bool = key(True, "Read rows in a random order, a new one in each epoch.")
    seed: int | None = derived_key("Seed of the order; auto = `trainer.seed`.")


@dataclass(frozen=True)
class PromptsConfig(RowConfig):
    """Prompts of the jobs that generate: validation files and lengths."""

    val_files: list[str] = key(
        [], "Validation files, in the formats of `train_files` (see docs/how_to/data.md); empty = no validation."
    )
    val_max_samples: int = key(
        -1, "Rows of `val_files` to use, drawn with `trainer.seed`; -1 = all.", at_least=1, allowed=(-1,)
    )
    reward_fn_key: str = key(
        "data_source", "Column of the name by which a row is scored and reported: `data_source` of reward functions."
    )
    truncation: str = key(
        "error",
        "Handling of prompts that are too long: stop with an error, or cut at the left, right or middle. A prompt "
        "with images is never cut.",
        choices=("error", "left", "right", "middle"),
    )
    max_prompt_length: int = key(512, "Longest prompt, in tokens.", at_least=1)
    max_response_length: int = key(512, "Longest response, in tokens.", at_least=1)
    val_batch_size: int | None = key(None, "Prompts per validation batch; null = all in one batch.", at_least=1)
    filter_overlong_prompts: bool = key(
        False, "Drop prompts longer than `max_prompt_length` (counted) instead of applying `truncation`."
    )
    image_key: str = key(
        "images",
        "Column of a row's images, for a vision-language model: a list of bytes, paths, or mappings with `bytes` or "
        "`path`, one for each `<image>` in the prompt.",
    )
    video_key: str = key("videos", "Column of videos, which no job reads: it must be empty.")
    mm_processor_kwargs: dict[str, Any] = key(
        {}, "Settings that replace those of the model's image processor, such as `max_pixels`."
    )
    image_patch_size: int | None = key(
        None, "Patch size of the vision tower, which must be the model's; null = unchecked.", at_least=1
    )


@dataclass(frozen=True)
class SamplerConfig:
    """A custom sampler, which decides the order of rows."""

    class_path: str | None = key(
        None, f"File or module of the class ({_SPEC}), called with `data_source` and `data_config`; null = none."
    )
    class_name: str | None = key(None, "Name of the class; null = none.")


@dataclass(frozen=True)
class CustomDatasetConfig:
    """A custom data set class: with verl's constructor, or derived from `megarl.data.RLHFDataset`."""

    path: str | None = key(None, f"File or module of the class ({_SPEC}); null = none.")
    name: str | None = key(None, "Name of the class; null = none.")


@dataclass(frozen=True)
class DataConfig(DataSourceConfig, PromptsConfig):
    """Prompts: files, lengths and prompts per step. `train_batch_size` counts prompts."""

    sampler: SamplerConfig = section(SamplerConfig)
    custom_cls: CustomDatasetConfig = section(CustomDatasetConfig)
    collate_fn: str | None = key(
        None,
        "Function from the samples of a batch to a mapping of columns, as verl's `collate_fn` (path.py:function or "
        "package.module.function); null = all entries become columns.",
    )
    gen_batch_size: int | None = derived_key(
        "Prompts that dynamic sampling (`algorithm.filter_groups`) admits at first; the unit of `max_num_gen_batches`; "
        "auto = `train_batch_size`.",
        at_least=1,
    )


@dataclass(frozen=True)
class GenerateDataConfig(PromptsConfig):
    """Prompts: files, texts, or lines of the standard input."""

    prompts: list[str] = key(
        [], "Texts, each sent as one user message after those of `val_files`; [-] = the lines of the standard input."
    )
    output_path: str | None = derived_key(
        "File for the responses, .jsonl or .parquet; auto = `answers.jsonl` in the run's folder."
    )


@dataclass(frozen=True)
class SupervisedDataConfig(DataSourceConfig):
    """Prompts with responses. `train_batch_size` counts rows of the data per optimizer step."""

    truncation: str = key(
        "error",
        "Handling of rows that are too long: stop with an error, or cut at the left or right.",
        choices=("error", "left", "right"),
    )
    max_length: int = key(1024, "Longest sequence (prompt and response), in tokens.", at_least=1)
    use_dynamic_bsz: bool = key(True, "Fill micro-batches up to `max_token_len_per_gpu` tokens.")
    max_token_len_per_gpu: int = key(
        16384, "Tokens per micro-batch and device; read with `use_dynamic_bsz`.", at_least=1
    )
    micro_batch_size_per_gpu: int | None = key(
        None,
        "Rows per micro-batch and data-parallel rank; required without `use_dynamic_bsz`; null = none.",
        at_least=1,
    )


@dataclass(frozen=True)
class SFTDataConfig(SupervisedDataConfig):
    """Prompts with responses. `train_batch_size` counts samples per optimizer step."""

    response_key: str = key(
        "response",
        "Column of the response: a text, or messages `{role, content}`, of which the assistant's are trained on.",
    )
    messages_key: str | None = key(
        None,
        "Column of whole conversations, as chat messages, instead of prompts and responses: every message of the "
        "assistant is trained on; null = `prompt_key` and `response_key`.",
    )


@dataclass(frozen=True)
class PairDataConfig(SupervisedDataConfig):
    """Prompts with a chosen and a rejected response. `train_batch_size` counts pairs per optimizer step."""

    val_files: list[str] = key([], "Parquet file or files with pairs for validation.")
    chosen_key: str = key("chosen", "Column of the better response: a text, or one assistant message in a list.")
    rejected_key: str = key("rejected", "Column of the worse response.")
    conversations: bool = key(
        False,
        "`chosen_key` and `rejected_key` hold whole conversations, as lists of chat messages that end with the "
        "response; `prompt_key` is not read.",
    )


@dataclass(frozen=True)
class PreferenceDataConfig(PairDataConfig):
    """Prompts with a chosen and a rejected response, or for KTO with a labelled one.

    `train_batch_size` counts pairs per optimizer step; for KTO it counts responses.
    """

    label_key: str | None = key(
        None,
        "KTO: column of labels, true or 1 = desirable, false or 0 = undesirable; rows then have `response_key` instead "
        "of a pair. null = pairs, which `loss.type=kto` splits into two responses each.",
    )
    response_key: str = key("response", "Column of the labelled response; read with `label_key`.")


@dataclass(frozen=True)
class RewardPairDataConfig(PairDataConfig):
    """Pairs for a reward model. `train_batch_size` counts pairs per optimizer step."""

    margin_key: str | None = key(
        None, "Column of margins: smallest difference between chosen and rejected reward; null = 0."
    )
