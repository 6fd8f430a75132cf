"""Prompts in batches, as the configuration asks for them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megarl.config.schema import AnswersConfig, TrainConfig
from megarl.data import RLHFDataset, StatefulLoader
from megarl.rollout.agents import check_agent_names
from megarl.trainer.rollout import AGENT_NAME


def prompt_loader(config: TrainConfig, files: list[str], tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Training prompts in batches of ``data.train_batch_size``; counts what it drops."""
    data = config.data
    dataset = _dataset(config, files, tokenizer)
    return StatefulLoader(
        dataset, data.train_batch_size, dataset.collate, seed=data.seed or 0, shuffle=data.shuffle, drop_last=True
    )


def validation_loader(config: AnswersConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Held-out prompts in file order, every one of them."""
    data = config.data
    dataset = _dataset(config, data.val_files, tokenizer)
    return StatefulLoader(dataset, data.val_batch_size, dataset.collate, seed=0, shuffle=False, drop_last=False)


def _dataset(config: AnswersConfig, files: list[str], tokenizer: PreTrainedTokenizerBase) -> RLHFDataset:
    data = config.data
    dataset = RLHFDataset(
        files,
        tokenizer,
        data.max_prompt_length,
        prompt_key=data.prompt_key,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    check_agent_names(config, dataset.source.column(AGENT_NAME), dataset.source.where)
    return dataset
