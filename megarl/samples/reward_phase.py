"""Reward phase: scores of reward functions, of a reward model, or their weighted sum."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megarl.base.errors import ConfigError, RewardError
from megarl.base.logs import ProcessLogs
from megarl.base.reductions import Metrics, Total
from megarl.cluster.role_groups import RewardModelGroup
from megarl.config.schema.jobs import ScoredJobConfig
from megarl.config.schema.rewards import RewardConfig, ScoringModelConfig
from megarl.data import DataProto, sequence_lengths
from megarl.data.columns import padded_pair
from megarl.data.images import IMAGES
from megarl.data.tokenization import Prompt, PromptEncoder
from megarl.data.tokenizers import control_tokens, load_tokenizer
from megarl.rewards.manager import Failures, NullReward, RewardManager, Scored, with_scores
from megarl.rewards.outcome import EXTRA
from megarl.samples.reward_functions import function_manager
from megarl.workers.row_math import row_sums, summary

logger = logging.getLogger(__name__)

SEQUENCES = ("prompts", "responses", "attention_mask", IMAGES)
RM_SCORE, FUNCTION_SCORE = "rm_score", "function_score"


def reward_manager(
    config: ScoredJobConfig, tokenizer: PreTrainedTokenizerBase, logs: ProcessLogs | None = None
) -> RewardManager | NullReward:
    """Build the manager of the configured reward functions; a null reward if their weight is 0.

    Raises:
        RewardError: a function cannot be imported, or has another signature than a reward function.
    """
    if config.reward.function_weight == 0:
        return NullReward()
    return function_manager(config, tokenizer, logs)


class ModelScores(NamedTuple):
    """Scores of a reward model.

    Attributes:
        scores: ``[b]`` float32.
        truncated: number of sequences that were too long and lost tokens at their left.
    """

    scores: Tensor
    truncated: int


class RewardPhase:
    """Scores batches of samples, in training and in validation.

    ``score = function_weight * function's score + model.weight * reward model's score``, at the last response token.
    A row whose function failed stays masked, whatever the reward model's score.

    Args:
        model: the reward model; None = functions only.
    """

    def __init__(
        self,
        functions: RewardManager | NullReward,
        tokenizer: PreTrainedTokenizerBase,
        keys: RewardConfig,
        model: RewardModelScorer | None = None,
    ) -> None:
        self.functions = functions
        self.tokenizer = tokenizer
        self.keys = keys
        self.model = model

    def score(self, batch: DataProto, *, check: bool = True) -> Scored[DataProto]:
        """Add ``token_level_scores``, ``response_mask`` and extra columns to the batch; see :class:`Scored`.

        With a reward model, also adds the column ``reward_extra_rm_score``, ``reward_extra_function_score`` if a
        function scores too, and metrics of both over the rows that count.

        Args:
            batch: samples; those that the agent runners scored have their outcomes.
            check: check the number of failed rows; False = the caller does, with :meth:`check`.

        Raises:
            RewardError: see the reward manager; or the reward model's score of a row is not finite.
        """
        scored = self.functions.score(batch, check=check)
        return scored if self.model is None else self._combine(scored, self.model.score(scored.batch))

    def check(self, parts: Sequence[Failures]) -> None:
        """Check the number of failed rows of several scored batches; see the reward manager."""
        self.functions.check(parts)

    def _combine(self, scored: Scored[DataProto], model: ModelScores) -> Scored[DataProto]:
        failed = torch.tensor(scored.extra_columns["reward_failed"].astype(bool))
        invalid = ~failed & ~model.scores.isfinite()
        if invalid.any():
            failed = self._mask_invalid(invalid, failed, model.scores)
        weight, kept = self.keys.function_weight or 0.0, ~failed
        functions = row_sums(scored.batch, "token_level_scores").float().masked_fill(failed, 0.0)
        parts = {RM_SCORE: model.scores} | ({FUNCTION_SCORE: functions} if weight else {})
        extras = {f"{EXTRA}{name}": _object_column(values, kept) for name, values in parts.items()}
        extras["reward_failed"] = failed.numpy().astype(object)
        metrics: Metrics = {"reward/failed": Total(failed.sum()), "reward/rm_truncated": Total(model.truncated)}
        for name, values in parts.items():
            metrics |= summary(f"reward/{name}", values[kept])
        scores = weight * functions + self.keys.model.weight * model.scores
        batch = with_scores(scored.batch, scores, kept).with_columns({}, extras)
        return Scored(batch, scored.metrics | metrics, scored.extra_columns | extras, scored.failures)

    def _mask_invalid(self, invalid: Tensor, failed: Tensor, scores: Tensor) -> Tensor:
        """Add the rows with a non-finite score to the failed rows, or raise if ``on_error`` is ``raise``."""
        row = int(invalid.nonzero()[0])
        message = (
            f"the reward model's score of row {row} is {scores[row].item()} ({int(invalid.sum())} rows are not finite)"
        )
        if self.keys.on_error == "raise":
            raise RewardError(f"{message}; reward.on_error=mask masks such rows", code="reward.model-score-not-finite")
        if (failed | invalid).all():
            raise RewardError(f"none of {len(invalid)} rows could be scored: {message}", code="reward.no-row-scored")
        logger.warning("masked: %s", message)
        return failed | invalid


def _object_column(values: Tensor, kept: Tensor) -> np.ndarray:
    """Numbers as a column ``[b]`` of objects; None for a failed row."""
    column = np.empty(len(values), dtype=object)
    column[:] = [value if keep else None for value, keep in zip(values.tolist(), kept.tolist(), strict=True)]
    return column


class SequenceReader:
    """Builds the sequences that a reward model reads from the policy's samples.

    If the reward model has another tokenizer, the reader decodes the response and encodes the conversation
    (``raw_prompt`` plus the response as the assistant's message) with the reward model's chat template.

    Args:
        image_tokens: most tokens of a sequence if the policy reads images, which are neither cut nor encoded again; 0 =
            it reads none.

    Raises:
        ConfigError: the vocabularies of the two tokenizers do not fit the configuration.
        ModelError: a tokenizer cannot be loaded.
    """

    def __init__(
        self, keys: ScoringModelConfig, policy_tokenizer: PreTrainedTokenizerBase, image_tokens: int = 0
    ) -> None:
        assert keys.max_length is not None, "filled in"
        self.max_length = keys.max_length
        if image_tokens > self.max_length:
            text = (
                f"reward.model.max_length={self.max_length} would cut prompts with images; set at least {image_tokens}"
            )
            raise ConfigError(f"{text}, data.max_prompt_length + data.max_response_length", code="reward.cuts-images")
        if image_tokens and keys.input_tokenizer is not None:
            raise ConfigError(
                f"reward.model.input_tokenizer={keys.input_tokenizer}: a reward model with another tokenizer than the "
                "policy's does not see its images; name a reward model with the policy's tokenizer, and remove the key",
                code="reward.no-images",
            )
        self._decoder: PreTrainedTokenizerBase | None = None
        model_tokenizer = load_tokenizer(str(keys.path))
        if keys.input_tokenizer is None:
            _check_same_vocabulary(model_tokenizer, policy_tokenizer, keys)
            return
        self._decoder = load_tokenizer(keys.input_tokenizer)
        if self._decoder.get_vocab() != policy_tokenizer.get_vocab():
            raise ConfigError(
                f"reward.model.input_tokenizer={keys.input_tokenizer} has other tokens than the policy's "
                f"tokenizer {policy_tokenizer.name_or_path}, whose responses it has to decode; name that one",
                code="reward.input-tokenizer",
            )
        self._encoder = PromptEncoder(model_tokenizer, generation_prompt=False, max_tokens=self.max_length)

    def read(self, batch: DataProto) -> tuple[DataProto, int]:
        """Build the reward model's batch, one row per sample; also return the number of truncated sequences.

        Raises:
            RewardError: the batch has no column ``raw_prompt`` to encode.
        """
        sequences = None if self._decoder is None else self._encode(batch, self._decoder)
        if sequences is None:
            prompts, responses = sequence_lengths(batch)
            if int((prompts + responses).max()) <= self.max_length:
                return batch.present(SEQUENCES), 0
            parts = zip(*(batch.unpadded(name) for name in SEQUENCES[:2]), strict=True)
            sequences = [[*prompt.tolist(), *response.tolist()] for prompt, response in parts]
        too_long = sum(len(ids) > self.max_length for ids in sequences)
        kept = [ids[-self.max_length :] for ids in sequences]  # the last token is the response, the others the prompt
        return DataProto.from_dict(padded_pair([ids[:-1] for ids in kept], [ids[-1:] for ids in kept])), too_long

    def _encode(self, batch: DataProto, decoder: PreTrainedTokenizerBase) -> list[list[int]]:
        prompts = batch.non_tensor_batch.get("raw_prompt")
        if prompts is None:
            raise RewardError(
                "the reward model has its own tokenizer and needs the column 'raw_prompt'", code="reward.no-raw-prompt"
            )
        sequences, control = [], control_tokens(self._encoder.tokenizer)
        for row, (messages, ids) in enumerate(zip(prompts, batch.unpadded("responses"), strict=True)):
            # The policy could write the reward model's control tokens as text.
            response = control.hide(decoder.decode(ids.tolist(), skip_special_tokens=True), "user")
            conversation = [*messages, {"role": "assistant", "content": response}]
            sequences.append(self._encoder.encode(Prompt(conversation), f"row {row} for the reward model"))
        return sequences


class RewardModelScorer:
    """Scores batches with the workers of the reward model."""

    def __init__(self, workers: RewardModelGroup, reader: SequenceReader) -> None:
        self.workers = workers
        self.reader = reader
        # Each data-parallel rank gets equally many rows, enough for its micro-batches.
        self.multiple = workers.layout.dp * workers.budgets["compute_rm_score"].multiple

    def score(self, batch: DataProto) -> ModelScores:
        """Score all rows, including failed ones."""
        sequences, truncated = self.reader.read(batch)
        padded, added = sequences.pad_to_divisor(self.multiple)
        return ModelScores(self.workers.compute_rm_score(padded).unpad(added).tensors["rm_scores"], truncated)


def _check_same_vocabulary(
    model: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, keys: ScoringModelConfig
) -> None:
    if model.get_vocab() != policy.get_vocab():
        raise ConfigError(
            f"reward.model.path={keys.path}: its tokenizer has other tokens than the policy's, "
            f"{policy.name_or_path}, so it cannot read the policy's token ids; set "
            f"reward.model.input_tokenizer={policy.name_or_path}",
            code="reward.other-vocabulary",
        )
