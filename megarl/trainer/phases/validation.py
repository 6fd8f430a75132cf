"""Validation: generate on held-out prompts, score, and report mean@N, best@k, worst@k and maj@k per data source.

For a prompt with N samples, best@k is the expected best of k of them over all subsets. With ``x_1 <= ... <= x_N``,

    best@k = sum_i x_i C(i-1, k-1) / C(N, k)

which is unbiased. If c of the x are 1 and the others 0, it is pass@k of Chen et al. 2021 (arXiv:2107.03374),
1 - C(N-c, k) / C(N, k). verl estimates best@k with 1000 draws of k samples with replacement, which gives a smaller
number: its best@N is below the best of the N. maj@k is the expected value of the most frequent answer among k samples.
It has no closed form and is averaged over all subsets, or over 1000 random subsets if there are more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.agents.types import ConversationGroup
from megarl.algorithms import sequence_counts
from megarl.base.reductions import Metrics, combine_metrics
from megarl.data import DataProto, StatefulLoader, sequence_lengths
from megarl.rewards.outcome import EXTRA, as_number
from megarl.samples.reward_phase import RewardPhase
from megarl.samples.rollouts import ROLLOUT_METRICS, Rollouts
from megarl.trainer.records.sample_records import Sample, describe_samples
from megarl.workers.row_math import generated_tokens, row_sums

CONVERSATION_METRICS = (
    *("env/number_of_valid_search", "env/ratio_of_valid_action", "env/finish_ratio", "tool_call_counts/mean"),
    *("rollout/replicas_lost", "rollout/runners_lost", "agent/failed"),
)
"""Conversation metrics that validation reports."""
PREDICTION = "pred"
"""Key under which a reward function returns the extracted answer, as in verl."""
MAX_SUBSETS = 1000
SEED = 42
CORE = ("mean@", "best@", "maj@")
"""Statistics at k = N that ``val-core`` has of the core variable."""


class Validator:
    """Evaluates the policy on held-out prompts.

    Args:
        rewards: scores them; the validation metric is this reward.
        loader: held-out prompts, in file order.

    Attributes:
        step_in_flight: step of :meth:`begin` without :meth:`end`; None = nothing is in flight.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        rewards: RewardPhase,
        loader: StatefulLoader,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.rollouts = rollouts
        self.rewards = rewards
        self.loader = loader
        self.tokenizer = tokenizer
        self._groups: list[list[ConversationGroup]] = []
        self.step_in_flight: int | None = None

    def begin(self, step: int) -> None:
        """Start the validation of the weights that the engines have, without waiting; :meth:`end` returns its results.

        The next weight sync waits for the samples, so they equal those of :meth:`run`.
        """
        self.step_in_flight = step
        self._groups = [self.rollouts.begin_validation(prompts, step, n) for n, prompts in enumerate(self.loader)]

    def end(self) -> tuple[Metrics, list[Sample]]:
        """Wait for the samples of :meth:`begin`, and score them; the results are those of :meth:`run`."""
        step, self.step_in_flight = self.step_in_flight, None
        assert step is not None, "nothing is in flight"
        parts = [self.rewards.score(self.rollouts.end_validation(groups)).batch for groups in self._groups]
        return self._results(parts, step)

    def run(
        self, step: int, stream: int | None = None, on_batch: Callable[[DataProto], None] = lambda batch: None
    ) -> tuple[Metrics, list[Sample]]:
        """Generate and score samples for all held-out prompts.

        Args:
            stream: seeds the draws: equal weights and streams give equal samples; None = ``step``.

        Returns:
            Metrics (see :func:`validation_metrics`), and the samples.
        """
        parts: list[DataProto] = []
        for number, prompts in enumerate(self.loader):
            samples = self.rollouts.validate(prompts, step if stream is None else stream, number)
            parts.append(self.rewards.score(samples).batch)
            on_batch(parts[-1])
        return self._results(parts, step)

    def _results(self, parts: Sequence[DataProto], step: int) -> tuple[Metrics, list[Sample]]:
        records = [record for part in parts for record in describe_samples(part, self.tokenizer, step)]
        conversations = [part.meta_info.get(ROLLOUT_METRICS, {}) for part in parts]
        return self._metrics(parts) | conversation_metrics(conversations, list(map(len, parts))), records

    def _metrics(self, parts: Sequence[DataProto]) -> Metrics:
        sources, prompts, failed = (_column(parts, name) for name in ("data_source", "uid", "reward_failed"))
        scores = np.concatenate([row_sums(part, "token_level_scores").numpy() for part in parts])
        scores[failed.astype(bool)] = np.nan
        extras = {name.removeprefix(EXTRA): _column(parts, name) for name in _extra_columns(parts)}
        answers = extras.pop(PREDICTION, None)
        variables = {name: _numbers(column) for name, column in extras.items()} | {"reward": scores}
        samples = self.rollouts.rollout.val_kwargs.n
        metrics = validation_metrics(sources, prompts, samples, variables, answers)
        lengths = np.concatenate(
            [sequence_counts(generated_tokens(part), sequence_lengths(part)[1]).numpy() for part in parts]
        )
        for source in dict.fromkeys(map(str, sources)):
            rows = sources.astype(str) == source
            metrics[f"val-aux/{source}/num_prompts"] = float(rows.sum() / samples)
            metrics[f"val-aux/{source}/response_length/mean"] = float(lengths[rows].mean())
            metrics[f"val-aux/{source}/failed_rewards"] = float(failed[rows].sum())
        metrics["val-aux/num_prompts"] = len(sources) / samples
        metrics["val-aux/failed_rewards"] = float(failed.sum())
        return metrics


def _extra_columns(parts: Sequence[DataProto]) -> list[str]:
    """Columns with extra numbers of the reward function, in any of the batches."""
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    return [name for name in names if name.startswith(EXTRA)]


def _column(parts: Sequence[DataProto], name: str) -> np.ndarray:
    """A column of all batches; None in batches without it."""
    return np.concatenate([part.non_tensor_batch.get(name, np.full(len(part), None, object)) for part in parts])


def _numbers(column: np.ndarray) -> np.ndarray:
    """Finite numbers of a column; NaN for any other value."""
    numbers = [as_number(value) for value in column]
    return np.array([np.nan if value is None or not np.isfinite(value) else value for value in numbers], dtype=float)


def conversation_metrics(batches: Sequence[Metrics], rows: Sequence[int]) -> Metrics:
    """Combine the conversation metrics of several batches as ``val-aux/<name>``.

    Args:
        rows: number of rows of each batch, which weights the means.
    """
    combined = combine_metrics(list(zip(batches, rows, strict=True)))
    return {f"val-aux/{name}": combined[name] for name in CONVERSATION_METRICS if name in combined}


def validation_metrics(
    data_sources: np.ndarray,
    prompts: np.ndarray,
    samples: int,
    variables: Mapping[str, np.ndarray],
    answers: np.ndarray | None = None,
) -> Metrics:
    """Compute ``val-core|val-aux/<data_source>/<variable>/<statistic>``, averaged over the prompts of a data source.

    The statistics are ``mean@N``; with N > 1 also ``std@N``, ``{best,worst}@k/{mean,std}`` for k = 2, 4, 8, ... and N,
    and ``maj@k/{mean,std}`` with extracted answers. A ``std`` is over subsets, so k = N has none. ``val-core`` has
    mean, best and maj at N of ``acc``, or of ``reward`` if a data source has no ``acc``; ``val-aux`` has the rest.

    A row without a number is skipped. A prompt with fewer than k numbers counts with all of its numbers.

    Args:
        data_sources: source of each row, ``[rows]``.
        prompts: prompt of each row, ``[rows]``.
        samples: N, rows per prompt.
        variables: numbers of the rows by name, ``[rows]`` each, NaN for a row without one; includes ``reward``.
        answers: answer that the reward function extracted from each row, compared as text, ``[rows]``; None = no
            answers. A row without an answer has no vote.
    """
    metrics: Metrics = {}
    for source in dict.fromkeys(map(str, data_sources)):
        of_source = data_sources.astype(str) == source
        groups = _groups(prompts[of_source])
        votes = None if answers is None else answers[of_source]
        if votes is not None and all(vote is None for vote in votes):
            votes = None
        columns = {name: values[of_source] for name, values in variables.items()}
        columns = {name: values for name, values in columns.items() if not np.isnan(values).all()}
        core = "acc" if "acc" in columns else "reward"
        for name, values in columns.items():
            for statistic, value in _over_prompts(values, votes, groups, samples).items():
                is_core = name == core and statistic.startswith(CORE) and f"@{samples}/" in f"{statistic}/"
                metrics[f"val-{'core' if is_core else 'aux'}/{source}/{name}/{statistic}"] = value
    return metrics


def expected_extreme(values: np.ndarray, k: int, *, largest: bool) -> tuple[float, float]:
    """Compute mean and standard deviation, over all subsets of k values, of the largest or smallest value.

    Args:
        values: ``[n]``, n >= k.
    """
    ordered = np.sort(values) if largest else np.sort(values)[::-1]
    subsets = math.comb(len(values), k)
    weights = np.array([math.comb(below, k - 1) / subsets for below in range(len(values))])
    mean = float(weights @ ordered)
    return mean, math.sqrt(max(0.0, float(weights @ (ordered - mean) ** 2)))


def expected_majority(values: np.ndarray, votes: np.ndarray, k: int) -> tuple[float, float]:
    """Compute mean and standard deviation, over subsets of k samples, of the majority answer's value.

    Ties are equally likely, and so are different values of equal answers.

    Args:
        values: of each sample, ``[n]``.
        votes: number of each sample's answer, from 0, ``[n]`` int.
    """
    members = subsets(len(values), k)
    ballots = np.eye(int(votes.max()) + 1)[votes]
    counts, sums = members @ ballots, members @ (ballots * values[:, None])
    most = counts == counts.max(1, keepdims=True)
    expected = (sums / np.maximum(counts, 1.0) * most).sum(1) / most.sum(1)
    return float(expected.mean()), float(expected.std())


@cache
def subsets(n: int, k: int) -> np.ndarray:
    """List subsets of k out of n, ``[subsets, n]`` of 0.0 and 1.0: all, or ``MAX_SUBSETS`` random ones."""
    if math.comb(n, k) <= MAX_SUBSETS:
        chosen = np.array(list(combinations(range(n), k)))
    else:
        drawn = np.random.default_rng([SEED, n, k]).random((MAX_SUBSETS, n))
        chosen = drawn.argsort(1)[:, :k]
    members = np.zeros((len(chosen), n))
    np.put_along_axis(members, chosen, 1.0, axis=1)
    return members


def subset_sizes(samples: int) -> list[int]:
    """List the k of best@k: powers of two below N, and N; empty for N = 1."""
    return [2**power for power in range(1, (samples - 1).bit_length())] + [samples] if samples > 1 else []


def _groups(prompts: np.ndarray) -> list[list[int]]:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows[str(prompt)].append(row)
    return list(rows.values())


def _over_prompts(
    values: np.ndarray, votes: np.ndarray | None, groups: Sequence[Sequence[int]], samples: int
) -> Metrics:
    """Each statistic as the mean over prompts."""
    collected: dict[str, list[float]] = defaultdict(list)
    for rows in groups:
        kept = [row for row in rows if not np.isnan(values[row])]
        if kept:
            ballots = None if votes is None else _answer_numbers(votes[kept])
            for name, value in _prompt_statistics(values[kept], ballots, samples).items():
                collected[name].append(value)
    return {name: float(np.mean(numbers)) for name, numbers in collected.items()}


def _prompt_statistics(values: np.ndarray, votes: np.ndarray | None, samples: int) -> Metrics:
    metrics = {f"mean@{samples}": float(values.mean())}
    if samples > 1:
        metrics[f"std@{samples}"] = float(values.std())
    for size in subset_sizes(samples):
        k = min(size, len(values))
        statistics = {f"best@{size}": expected_extreme(values, k, largest=True)}
        statistics[f"worst@{size}"] = expected_extreme(values, k, largest=False)
        if votes is not None:
            statistics[f"maj@{size}"] = expected_majority(values, votes, k)
        for name, (mean, std) in statistics.items():
            metrics[f"{name}/mean"] = mean
            if size < samples:
                metrics[f"{name}/std"] = std
    return metrics


def _answer_numbers(votes: np.ndarray) -> np.ndarray:
    """Equal answers get equal numbers; None equals no text."""
    texts = [None if vote is None else str(vote) for vote in votes]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return np.array([numbers[text] for text in texts])
