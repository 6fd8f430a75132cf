"""Validation: generate on held-out prompts, score, and report per data source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.data import DataProto, StatefulLoader
from megarl.rewards import RewardManager
from megarl.trainer.metrics import Metrics, validation_metrics
from megarl.trainer.rollout import ROLLOUT_METRICS, RolloutPhase
from megarl.trainer.samples import Sample, describe_samples

SHOWN = ("env/number_of_valid_search", "env/ratio_of_valid_action", "env/finish_ratio", "tool_call_counts/mean")
"""What validation reports of conversations, where it is told."""


class Validator:
    """Measures the policy on held-out prompts.

    Args:
        rollout: generates.
        rewards: scores; the validation metric is its reward.
        loader: held-out prompts, in file order.
        tokenizer: decodes answers for the dump.
    """

    def __init__(
        self,
        rollout: RolloutPhase,
        rewards: RewardManager,
        loader: StatefulLoader,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.rollout = rollout
        self.rewards = rewards
        self.loader = loader
        self.tokenizer = tokenizer

    def run(self, step: int) -> tuple[Metrics, list[Sample]]:
        """``val-core/<data_source>/<variable>/mean@N`` and the answers, on all held-out prompts.

        The variable is ``acc`` where the reward function returns one beside the score, otherwise ``reward``.
        """
        parts: list[DataProto] = []
        for number, prompts in enumerate(self.loader):
            parts.append(self.rewards.score(self.rollout.validate(prompts, step, number)).batch)
        samples = [sample for part in parts for sample in describe_samples(part, self.tokenizer, step)]
        columns = [part.non_tensor_batch for part in parts]
        told_apart = all("acc" in sample for sample in samples)
        numbers = [sample["acc" if told_apart else "score"] for sample in samples]
        scores = [np.nan if number is None else float(number) for number in numbers]
        metrics = validation_metrics(
            np.concatenate([column["data_source"] for column in columns]),
            np.array(scores, dtype=float),
            np.concatenate([column["uid"] for column in columns]),
            self.rollout.rollout.val_kwargs.n,
            "acc" if told_apart else "reward",
        )
        metrics["val-aux/num_prompts"] = float(sum(len(part) for part in parts) / self.rollout.rollout.val_kwargs.n)
        metrics |= conversation_metrics(
            [part.meta_info.get(ROLLOUT_METRICS, {}) for part in parts], list(map(len, parts))
        )
        metrics["val-aux/failed_rewards"] = float(sum(sample["score"] is None for sample in samples))
        return metrics, samples


def conversation_metrics(told: Sequence[Metrics], rows: Sequence[int]) -> Metrics:
    """``val-aux/<name>`` of what was told of conversations with tools or a search: the mean over batches by their rows.

    Args:
        told: metrics of each batch.
        rows: its rows.
    """
    names = [name for name in dict.fromkeys(name for metrics in told for name in metrics) if name in SHOWN]
    result = {}
    for name in names:
        known = [(metrics[name], count) for metrics, count in zip(told, rows, strict=True) if name in metrics]
        result[f"val-aux/{name}"] = sum(value * count for value, count in known) / sum(count for _, count in known)
    return result
