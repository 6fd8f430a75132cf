"""Selection of the samples to train on: dynamic sampling, ReMax baselines, best of n."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megarl.algorithms.selection import best_of_groups, varied_groups
from megarl.base.errors import DataError, StepImpossible
from megarl.base.reductions import Metrics, Total, combine_metrics
from megarl.config.schema.jobs import TrainConfig
from megarl.data import DataProto, sequence_lengths
from megarl.rewards.manager import Failures, Scored
from megarl.samples.rollouts import BASELINE
from megarl.workers.row_math import GENERATED_TOKENS, counted_rows, generated_tokens, row_sums, trained_tokens

SCORES = ("score", "seq_reward")
"""Values of ``algorithm.filter_groups.metric`` that mean the score itself."""


class ScoredGroups(NamedTuple):
    """Groups that were scored together.

    Attributes:
        numbers: of the groups, in the order of their rows.
        rows: their samples, without ReMax's baselines.
        varied: numbers of the groups whose samples differ in ``filter_groups.metric``; all without dynamic sampling.
        tokens: generated tokens, with the baselines'.
        metrics: of conversations and rewards.
        failures: rows without a score.
    """

    numbers: Sequence[int]
    rows: DataProto
    varied: Collection[int]
    tokens: int
    metrics: Metrics
    failures: Failures

    def group(self, number: int) -> DataProto:
        """Return the rows of a group."""
        size, place = len(self.rows) // len(self.numbers), self.numbers.index(number)
        return self.rows[place * size : (place + 1) * size]


class GroupSelection:
    """Selects the rows to train on from scored groups.

    ReMax's baselines become a column. With ``filter_groups`` (dynamic sampling, DAPO), groups without variance give
    their slots back, until ``max_num_gen_batches`` batches of prompts were admitted. ``best_of_n`` keeps the best k of
    n samples per prompt.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.filter = config.algorithm.filter_groups
        self.best = config.algorithm.best_of_n
        self.batch_size = config.data.train_batch_size
        self.gen_batch_size = config.data.gen_batch_size or self.batch_size

    @property
    def max_dropped(self) -> float:
        """Most groups of a batch whose slots are refilled: the prompts are those of ``max_num_gen_batches``."""
        if not self.filter.max_num_gen_batches:
            return math.inf
        prompts = self.filter.max_num_gen_batches * self.gen_batch_size
        return max(0, prompts - max(self.batch_size, self.gen_batch_size))

    def groups(self, numbers: Sequence[int], scored: Scored[DataProto], metrics: Metrics) -> ScoredGroups:
        """Find the groups without variance among scored ones; ``numbers`` are in the order of their rows."""
        rows, baseline_metrics = split_baselines(scored.batch)
        varied: Collection[int] = numbers
        if self.filter.enable:
            is_varied = varied_groups(
                self._filter_values(rows), rows.non_tensor_batch["uid"], counted_rows(rows).numpy()
            )
            of_group = is_varied[:: len(rows) // len(numbers)].tolist()
            varied = {number for number, differs in zip(numbers, of_group, strict=True) if differs}
        tokens = int(generated_tokens(scored.batch).sum())
        return ScoredGroups(numbers, rows, varied, tokens, metrics | scored.metrics | baseline_metrics, scored.failures)

    def batch(
        self,
        scored: Mapping[int, ScoredGroups],
        numbers: Sequence[int],
        dropped: Mapping[int, ScoredGroups],
        surplus: int,
    ) -> tuple[DataProto, Metrics]:
        """Return the batch of the groups ``numbers`` to train on, and its metrics.

        ``scored`` has them and others; ``dropped`` has the groups without variance since the last batch. ``surplus``
        groups were admitted beyond the batch and start again.
        """
        parts = parts_of(scored, numbers, dropped)
        metrics: Metrics = combine_metrics([(part.metrics, len(part.rows)) for part in parts])
        if self.filter.enable:
            filled, asked = len(dropped.keys() & {*numbers}), len({*numbers, *dropped})
            metrics["train/num_gen_batches"] = Total(-(-asked // self.gen_batch_size))
            metrics["filter_groups/asked"] = Total(asked)
            metrics["filter_groups/dropped"] = Total(len(dropped))
            metrics["filter_groups/surplus"] = Total(surplus)
            metrics["filter_groups/filled"] = Total(filled)
            metrics["filter_groups/efficiency"] = (len(numbers) - filled) / asked
        whole = len(parts) == 1 and list(parts[0].numbers) == list(numbers)
        batch = parts[0].rows if whole else join([scored[number].group(number) for number in numbers])
        batch.meta_info[GENERATED_TOKENS] = sum(part.tokens for part in parts)
        if self.best.enable:
            batch = keep_best(batch, self.best.keep, self.best.min_score, metrics)
        return batch, metrics

    def fill(self, missing: int, dropped: Sequence[int]) -> list[int]:
        """Return the dropped groups that fill a batch.

        Raises:
            StepImpossible: ``on_shortage`` is ``stop``.
        """
        if self.filter.on_shortage == "stop":
            found = self.batch_size - missing
            raise StepImpossible(
                f"{self.filter.max_num_gen_batches} batches of prompts (algorithm.filter_groups.max_num_gen_batches), "
                f"{found + len(dropped)} prompts, were sampled, and the samples of only {found} of them differ in "
                f"{self.filter.metric}; data.train_batch_size={self.batch_size} are needed. The task is too easy or "
                "too hard for the policy: change the data, allow more batches, or set "
                "algorithm.filter_groups.on_shortage=fill",
                code="algorithm.too-few-groups",
            )
        return sorted(dropped)[:missing]

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


def parts_of(
    scored: Mapping[int, ScoredGroups], numbers: Sequence[int], dropped: Mapping[int, ScoredGroups]
) -> list[ScoredGroups]:
    """Return what was scored together for a batch, each once, by the number of its first group."""
    used = {id(part): part for part in [*dropped.values(), *(scored[number] for number in numbers)]}
    return sorted(used.values(), key=lambda part: part.numbers[0])


def split_baselines(batch: DataProto) -> tuple[DataProto, Metrics]:
    """Drop the greedy ReMax samples and keep their scores as the column ``reward_baselines``.

    If a prompt's greedy sample has no score, its other samples are masked.

    Returns:
        The other samples, and the metrics ``reward_baselines/{mean,failed}``.
    """
    if BASELINE not in batch.non_tensor_batch:
        return batch, {}
    flags = batch.non_tensor_batch[BASELINE].astype(bool)
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
    rest = rest.select(None, [name for name in rest.non_tensor_batch if name != BASELINE])
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
    """Concatenate batches; a column missing in one is None there."""
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
