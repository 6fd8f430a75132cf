"""Prompts in batches, as the configuration asks for them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megarl.config.schema import AnswersConfig, PromptsConfig, TrainConfig
from megarl.data import RLHFDataset, StatefulLoader


def prompt_loader(config: TrainConfig, files: list[str], tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Training prompts in batches of ``data.train_batch_size``; counts what it drops."""
    data = config.data
    dataset = _dataset(data, files, tokenizer)
    return StatefulLoader(
        dataset, data.train_batch_size, dataset.collate, seed=data.seed or 0, shuffle=data.shuffle, drop_last=True
    )


def validation_loader(config: AnswersConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Held-out prompts in file order, every one of them."""
    data = config.data
    dataset = _dataset(data, data.val_files, tokenizer)
    return StatefulLoader(dataset, data.val_batch_size, dataset.collate, seed=0, shuffle=False, drop_last=False)


def _dataset(data: PromptsConfig, files: list[str], tokenizer: PreTrainedTokenizerBase) -> RLHFDataset:
    return RLHFDataset(
        files,
        tokenizer,
        data.max_prompt_length,
        prompt_key=data.prompt_key,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
