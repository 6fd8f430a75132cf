"""The reward model as the driver sees it: its workers, and the sequences that they are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megarl.cluster import PlacedPool, WorkerGroup, wait_ready
from megarl.config.batch import reward_micro_batches
from megarl.config.evaluate_schema import EvaluateConfig
from megarl.config.rewards import RewardModelConfig
from megarl.config.schema import TrainConfig
from megarl.data import DataProto, attention_mask_of, pad_left, pad_right, sequence_lengths
from megarl.data.prompts import Prompt, PromptEncoder
from megarl.errors import ConfigError, RewardError
from megarl.models import read_model_config
from megarl.models.sequence_cost import sequence_cost
from megarl.trainer.budgets import budget
from megarl.trainer.session import load_tokenizer
from megarl.workers.layouts import layout_of
from megarl.workers.settings import RoleSettings

SEQUENCES = ["prompts", "responses", "attention_mask"]


def reward_model_group(config: TrainConfig | EvaluateConfig, pool: PlacedPool) -> WorkerGroup:
    """The reward model's workers, not yet initialised."""
    keys, path = config.reward_model, str(config.reward_model.model.path)
    settings = RoleSettings(
        model_path=path,
        layout=layout_of(keys.megatron),
        megatron=keys.megatron,
        optim=None,
        total_updates=0,
        device=config.trainer.device,
        seed=config.trainer.seed,
        external_lib=config.actor_rollout_ref.model.own_modules,
    )
    cut = budget(reward_micro_batches(config), sequence_cost(read_model_config(path), value_head=True))
    worker, kwargs = "megarl.workers.reward_model:RewardModelWorker", {"settings": settings, "budget": cut}
    return WorkerGroup("reward_model", worker, kwargs, settings.layout, pool, budgets={"compute_rm_score": cut})


def started_reward_model(config: TrainConfig | EvaluateConfig, pool: PlacedPool) -> WorkerGroup:
    """The reward model's workers, ready to score, where no other role is started beside them.

    Raises:
        WorkerError: a process failed.
    """
    workers = reward_model_group(config, pool)
    wait_ready([workers])
    workers.init_model()
    return workers


class ModelScores(NamedTuple):
    """What a reward model says of a batch.

    Attributes:
        scores: ``[b]`` float32.
        truncated: sequences that were too long and were cut at their left.
    """

    scores: Tensor
    truncated: int


class SequenceReader:
    """The sequences that a reward model reads, from a batch of the policy's answers.

    Where it has another tokenizer, the answer is decoded, and the conversation (``raw_prompt``, and the answer as the
    assistant's message) is encoded with its own chat template.

    Args:
        keys: the ``reward_model`` section.
        policy_tokenizer: of the answers.

    Raises:
        ConfigError: the two tokenizers do not fit the configuration.
        ModelError: a tokenizer cannot be loaded.
    """

    def __init__(self, keys: RewardModelConfig, policy_tokenizer: PreTrainedTokenizerBase) -> None:
        assert keys.max_length is not None, "filled in"
        self.max_length = keys.max_length
        self._decoder: PreTrainedTokenizerBase | None = None
        own = load_tokenizer(str(keys.model.path))
        if keys.model.input_tokenizer is None:
            _check_same(own, policy_tokenizer, keys)
            return
        self._decoder = load_tokenizer(keys.model.input_tokenizer)
        if self._decoder.get_vocab() != policy_tokenizer.get_vocab():
            raise ConfigError(
                f"reward_model.model.input_tokenizer={keys.model.input_tokenizer} has other tokens than the policy's "
                f"tokenizer {policy_tokenizer.name_or_path}, whose answers it is to decode; name that one"
            )
        self._encoder = PromptEncoder(own, generation_prompt=False)

    def read(self, batch: DataProto) -> tuple[DataProto, int]:
        """The batch that the reward model is sent, a row for each, and how many sequences were cut.

        Raises:
            RewardError: the batch has no ``raw_prompt`` to encode.
        """
        sequences = None if self._decoder is None else self._encoded(batch, self._decoder)
        if sequences is None:
            prompts, responses = sequence_lengths(batch)
            if int((prompts + responses).max()) <= self.max_length:
                return batch.select(SEQUENCES, []), 0
            ids, real = (
                torch.cat([batch.tensors[name] for name in SEQUENCES[:2]], dim=1),
                batch.tensors["attention_mask"],
            )
            sequences = [row[kept.bool()].tolist() for row, kept in zip(ids, real, strict=True)]
        too_long = sum(len(ids) > self.max_length for ids in sequences)
        return _as_batch([ids[-self.max_length :] for ids in sequences]), too_long

    def _encoded(self, batch: DataProto, decoder: PreTrainedTokenizerBase) -> list[list[int]]:
        prompts = batch.non_tensor_batch.get("raw_prompt")
        if prompts is None:
            raise RewardError("the reward model has a tokenizer of its own and needs the column 'raw_prompt'")
        _, lengths = sequence_lengths(batch)
        sequences = []
        for row, (messages, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
            answer = decoder.decode(batch.tensors["responses"][row, :length].tolist(), skip_special_tokens=True)
            conversation = [*messages, {"role": "assistant", "content": answer}]
            sequences.append(self._encoder.encode(Prompt(conversation), f"row {row} for the reward model"))
        return sequences


class RewardModelScorer:
    """Has a batch of answers scored by the reward model.

    Args:
        workers: the role.
        reader: makes the sequences.
        multiple: of which the number of rows must be a multiple.
    """

    def __init__(self, workers: WorkerGroup, reader: SequenceReader, multiple: int) -> None:
        self.workers = workers
        self.reader = reader
        self.multiple = multiple

    def score(self, batch: DataProto) -> ModelScores:
        """Scores of all rows, failed ones included."""
        sequences, truncated = self.reader.read(batch)
        padded, added = sequences.pad_to_divisor(self.multiple)
        return ModelScores(self.workers.compute_rm_score(padded).unpad(added).tensors["rm_scores"], truncated)


def reward_model_scorer(workers: WorkerGroup, reader: SequenceReader) -> RewardModelScorer:
    """The scorer of started workers: each data-parallel rank gets equally many rows, enough for its micro-batches."""
    return RewardModelScorer(workers, reader, workers.layout.dp * workers.budgets["compute_rm_score"].multiple)


def _as_batch(sequences: Sequence[list[int]]) -> DataProto:
    """Whole sequences as rows: the last token is the response, the rest the prompt."""
    tensors = {
        "prompts": pad_left([ids[:-1] for ids in sequences]),
        "responses": pad_right([ids[-1:] for ids in sequences]),
    }
    lengths = [len(ids) - 1 for ids in sequences]
    tensors["attention_mask"] = attention_mask_of(lengths, [1] * len(sequences), tensors["prompts"].shape[1], 1)
    return DataProto.from_dict(tensors)


def _check_same(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, keys: RewardModelConfig) -> None:
    if own.get_vocab() != policy.get_vocab():
        raise ConfigError(
            f"reward_model.model.path={keys.model.path}: its tokenizer has other tokens than the policy's, "
            f"{policy.name_or_path}, so the policy's token ids mean nothing to it; set "
            f"reward_model.model.input_tokenizer={policy.name_or_path}"
        )
