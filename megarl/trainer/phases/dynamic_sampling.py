"""Dynamic sampling: collect the scored samples of a step over rounds, drop zero-variance groups, keep the best of n."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.algorithms.selection import best_of_groups, varied_groups
from megarl.base.errors import DataError, StepImpossible
from megarl.base.reductions import Total, combine_metrics
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto, sequence_lengths
from megarl.trainer.metrics.step_metrics import GENERATED_TOKENS, Metrics
from megarl.workers.row_math import counted_rows, generated_tokens, row_sums, trained_tokens

SCORES = ("score", "seq_reward")
"""Values of ``algorithm.filter_groups.metric`` that mean the score itself."""


class SampleCollector:
    """Collects the scored samples of one step, round by round.

    Each round first drops the ReMax baselines and keeps their scores as a column. With ``filter_groups`` it then drops
    zero-variance groups and requests replacements. At the end ``best_of_n`` keeps the best k of n samples per prompt.

    Args:
        config: complete.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.filter = config.algorithm.filter_groups
        self.best = config.algorithm.best_of_n
        self.samples = config.actor_rollout_ref.rollout.n
        self.batch_size = config.data.train_batch_size
        self.round_size = config.data.gen_batch_size or self.batch_size
        self._reset()

    def _reset(self) -> None:
        self.rounds = 0
        self._prompts = self._kept = self._generated = 0
        self._varied: list[DataProto] = []
        self._zero_variance: list[DataProto] = []
        self._metrics: list[tuple[Metrics, int]] = []

    def add(self, scored: DataProto, metrics: Metrics) -> int:
        """Add the scored samples of a round.

        Args:
            scored: samples of the round, groups adjacent.
            metrics: rollout and reward metrics of the round.

        Returns:
            Number of prompts of the next round; 0 if the batch is full or no more rounds are allowed.
        """
        self.rounds += 1
        self._generated += int(generated_tokens(scored).sum())
        batch, baseline_metrics = split_baselines(scored)
        self._metrics.append((metrics | baseline_metrics, len(batch)))
        self._prompts += len(batch) // self.samples
        if not self.filter.enable:
            self._varied.append(batch)
            return 0
        varied = varied_groups(self._filter_values(batch), batch.non_tensor_batch["uid"], counted_rows(batch).numpy())
        self._kept += int(varied.sum()) // self.samples
        self._varied.append(batch[varied])
        self._zero_variance.append(batch[~varied])
        return self._next_round_size()

    def finish(self, metrics: Metrics) -> DataProto:
        """Return the batch of the step, add its metrics, and reset for the next step.

        Raises:
            StepImpossible: too few groups have varied scores, and ``on_shortage`` is ``stop``.
        """
        metrics |= combine_metrics(self._metrics)
        batch = self._filtered(metrics) if self.filter.enable else join(self._varied)
        batch.meta_info[GENERATED_TOKENS] = self._generated
        self._reset()
        return keep_best(batch, self.best.keep, self.best.min_score, metrics) if self.best.enable else batch

    def _filter_values(self, batch: DataProto) -> np.ndarray:
        """Value of ``filter_groups.metric`` per row; NaN for a row without one."""
        name = self.filter.metric
        if name in SCORES:
            scores: np.ndarray = row_sums(batch, "token_level_scores").numpy()
            return scores
        column = batch.non_tensor_batch.get(f"reward_extra_{name}")
        if column is None:
            names = [key.removeprefix("reward_extra_") for key in batch.non_tensor_batch if key.startswith("reward_ex")]
            raise DataError(
                f"algorithm.filter_groups.metric={name!r}: the reward function returns no such number; set score, or "
                f"one of {names}",
                code="algorithm.no-filter-metric",
            )
        return np.array([np.nan if value is None else float(value) for value in column])

    def _next_round_size(self) -> int:
        """Prompts of the next round, by the share of groups kept so far."""
        missing, max_rounds = self.batch_size - self._kept, self.filter.max_num_gen_batches
        if missing <= 0 or (max_rounds and self.rounds >= max_rounds):
            return 0
        return min(self.round_size, math.ceil(missing * self._prompts / self._kept) if self._kept else self.round_size)

    def _filtered(self, metrics: Metrics) -> DataProto:
        missing = max(self.batch_size - self._kept, 0)
        metrics["train/num_gen_batches"] = Total(self.rounds)
        metrics["filter_groups/asked"] = Total(self._prompts)
        metrics["filter_groups/dropped"] = Total(self._prompts - self._kept)
        metrics["filter_groups/surplus"] = Total(max(self._kept - self.batch_size, 0))
        metrics["filter_groups/filled"] = Total(missing)
        metrics["filter_groups/efficiency"] = (self.batch_size - missing) / self._prompts
        parts = [part for part in self._varied if len(part)]
        if missing:
            if self.filter.on_shortage == "stop":
                raise StepImpossible(
                    f"{self.rounds} rounds of generation (algorithm.filter_groups.max_num_gen_batches="
                    f"{self.filter.max_num_gen_batches}) sampled {self._prompts} prompts, and the samples of only "
                    f"{self._kept} of them differ in {self.filter.metric}; data.train_batch_size={self.batch_size} are "
                    "needed. The task is too easy or too hard for the policy: change the data, allow more rounds, or "
                    "set algorithm.filter_groups.on_shortage=fill",
                    code="algorithm.too-few-groups",
                )
            parts += [part for part in self._zero_variance if len(part)]
        return join(parts)[: self.batch_size * self.samples]


def split_baselines(batch: DataProto) -> tuple[DataProto, Metrics]:
    """Drop the greedy ReMax samples and keep their scores as the column ``reward_baselines``.

    If the greedy sample of a prompt has no score, the other samples of the prompt are masked.

    Returns:
        The other samples, and the metrics ``reward_baselines/{mean,failed}``.
    """
    if "is_baseline" not in batch.non_tensor_batch:
        return batch, {}
    flags = batch.non_tensor_batch["is_baseline"].astype(bool)
    baselines, rest = batch[flags], batch[~flags]
    scores = dict(
        zip(
            baselines.non_tensor_batch["uid"].tolist(),
            zip(row_sums(baselines, "token_level_scores").tolist(), counted_rows(baselines).tolist(), strict=True),
            strict=True,
        )
    )
    of_rows = [scores[uid] for uid in rest.non_tensor_batch["uid"].tolist()]
    has_baseline = torch.tensor([counted for _, counted in of_rows])
    baseline_scores = torch.tensor([score for score, _ in of_rows], dtype=torch.float32)
    valid = [score for score, counted in scores.values() if counted]
    metrics: Metrics = {"reward_baselines/failed": Total(len(scores) - len(valid))}
    if valid:
        metrics["reward_baselines/mean"] = sum(valid) / len(valid)
    rest.non_tensor_batch.pop("is_baseline")
    return _train_rows(rest, has_baseline).with_columns({"reward_baselines": baseline_scores}), metrics


def keep_best(batch: DataProto, keep: int, min_score: float | None, metrics: Metrics) -> DataProto:
    """Keep the best ``keep`` samples of each prompt; mask failed samples and scores below ``min_score``.

    ``metrics`` gets ``best_of_n/{all,kept}/mean`` and ``best_of_n/masked``.
    """
    scores, counted = row_sums(batch, "token_level_scores").numpy(), counted_rows(batch).numpy()
    best = best_of_groups(scores, batch.non_tensor_batch["uid"], counted, keep)
    trained = counted[best] & (scores[best] >= (-np.inf if min_score is None else min_score))
    if counted.any():
        metrics["best_of_n/all/mean"] = float(scores[counted].mean())
        metrics["best_of_n/kept/mean"] = float(scores[best][counted[best]].mean())
    metrics["best_of_n/masked"] = Total((~trained).sum())
    return _train_rows(batch[best], torch.from_numpy(trained))


def join(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate the rows of all rounds; a column missing in a round is None there."""
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    filled = [
        part.with_columns({}, {name: [None] * len(part) for name in names if name not in part.non_tensor_batch})
        for part in parts
    ]
    return DataProto.concat(filled) if len(filled) > 1 else filled[0]


def _train_rows(batch: DataProto, rows: torch.Tensor) -> DataProto:
    """Clear ``response_mask`` of all rows but ``rows``, ``[b]`` bool: the others do not train."""
    kept = torch.repeat_interleave(rows, sequence_lengths(batch)[1])
    return batch.with_packed({"response_mask": trained_tokens(batch) & kept})
