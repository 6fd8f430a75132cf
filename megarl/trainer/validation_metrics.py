"""What N answers to each held-out prompt tell of a policy: mean@N, best@k, worst@k and maj@k, by verl's names.

Of one prompt with N answers, best@k is the expected best of k of them, over all subsets: with ``x_1 <= ... <= x_N``,

    best@k = sum_i x_i C(i-1, k-1) / C(N, k)

which is unbiased, and pass@k of Chen et al. 2021 (arXiv:2107.03374), 1 - C(N-c, k) / C(N, k), where c of the x are 1
and the others 0. verl estimates best@k with 1000 draws of k answers with replacement, and so finds less: its best@N is
below the best of the N. maj@k is the expected value of the answer that most of k answers give; it has no closed form
and is averaged over all subsets, or over 1000 drawn ones where there are more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations

import numpy as np

from megarl.trainer.metrics import Metrics

MOST_SUBSETS = 1000
SEED = 42
CORE = ("mean@", "best@", "maj@")
"""What ``val-core`` has of the data source's first variable, at k = N."""


def validation_metrics(
    data_sources: np.ndarray,
    prompts: np.ndarray,
    samples: int,
    variables: Mapping[str, np.ndarray],
    answers: np.ndarray | None = None,
) -> Metrics:
    """``val-core|val-aux/<data_source>/<variable>/<statistic>``, each the mean over the data source's prompts.

    The statistics are ``mean@N``; with more than one answer per prompt also ``std@N``, ``{best,worst}@k/{mean,std}``
    for k = 2, 4, 8, ... and N, and ``maj@k/{mean,std}`` where there are extracted answers (a ``std`` is over subsets,
    of which there is but one at k = N). In ``val-core`` are mean, best and maj at N of ``acc``, or of ``reward`` where
    a data source has no ``acc``; everything else is in ``val-aux``.

    A row without a number is left out. A prompt with fewer numbers than k counts with those that it has.

    Args:
        data_sources: source of each row, ``[rows]``.
        prompts: which prompt each row answers, ``[rows]``.
        samples: N, rows per prompt.
        variables: numbers of the rows by name, ``[rows]`` each, NaN where a row has none; ``reward`` is one of them.
        answers: what the reward function extracted from each row, to be compared as text, ``[rows]``; None = nothing.
            Rows without an answer vote for none.
    """
    metrics: Metrics = {}
    for source in dict.fromkeys(map(str, data_sources)):
        of_source = data_sources.astype(str) == source
        groups = _groups(prompts[of_source])
        votes = None if answers is None else answers[of_source]
        if votes is not None and all(vote is None for vote in votes):
            votes = None
        told = {name: values[of_source] for name, values in variables.items() if not np.isnan(values[of_source]).all()}
        core = "acc" if "acc" in told else "reward"
        for name, values in told.items():
            for statistic, value in _over_prompts(values, votes, groups, samples).items():
                is_core = name == core and statistic.startswith(CORE) and f"@{samples}/" in f"{statistic}/"
                metrics[f"val-{'core' if is_core else 'aux'}/{source}/{name}/{statistic}"] = value
    return metrics


def expected_extreme(values: np.ndarray, k: int, *, largest: bool) -> tuple[float, float]:
    """Mean and standard deviation of the largest, or the smallest, of k of the values, over all subsets.

    Args:
        values: ``[n]``, n >= k.
        k: size of a subset.
        largest: whether the largest counts.
    """
    ordered = np.sort(values) if largest else np.sort(values)[::-1]
    subsets = math.comb(len(values), k)
    weights = np.array([math.comb(below, k - 1) / subsets for below in range(len(values))])
    mean = float(weights @ ordered)
    return mean, math.sqrt(max(0.0, float(weights @ (ordered - mean) ** 2)))


def expected_majority(values: np.ndarray, votes: np.ndarray, k: int) -> tuple[float, float]:
    """Mean and standard deviation of the value of what most of k answers say, over subsets.

    Where several say as many, each of these is as likely; where equal answers have different values, each of those is.

    Args:
        values: of each answer, ``[n]``.
        votes: number of what each answer says, from 0, ``[n]`` int.
        k: size of a subset.
    """
    members = subsets(len(values), k)
    ballots = np.eye(int(votes.max()) + 1)[votes]
    counts, sums = members @ ballots, members @ (ballots * values[:, None])
    most = counts == counts.max(1, keepdims=True)
    found = (sums / np.maximum(counts, 1.0) * most).sum(1) / most.sum(1)
    return float(found.mean()), float(found.std())


@cache
def subsets(n: int, k: int) -> np.ndarray:
    """Members of subsets of k out of n, ``[subsets, n]`` of 0.0 and 1.0: all, or ``MOST_SUBSETS`` by a fixed seed."""
    if math.comb(n, k) <= MOST_SUBSETS:
        chosen = np.array(list(combinations(range(n), k)))
    else:
        drawn = np.random.default_rng([SEED, n, k]).random((MOST_SUBSETS, n))
        chosen = drawn.argsort(1)[:, :k]
    members = np.zeros((len(chosen), n))
    np.put_along_axis(members, chosen, 1.0, axis=1)
    return members


def sizes(samples: int) -> list[int]:
    """The k of best@k: powers of two below N, and N; none where N is 1."""
    return [2**power for power in range(1, (samples - 1).bit_length())] + [samples] if samples > 1 else []


def _groups(prompts: np.ndarray) -> list[list[int]]:
    """Rows of each prompt."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows[str(prompt)].append(row)
    return list(rows.values())


def _over_prompts(
    values: np.ndarray, votes: np.ndarray | None, groups: Sequence[Sequence[int]], samples: int
) -> Metrics:
    """Mean over prompts of each statistic."""
    found: dict[str, list[float]] = defaultdict(list)
    for rows in groups:
        kept = [row for row in rows if not np.isnan(values[row])]
        if kept:
            told = None if votes is None else _numbered(votes[kept])
            for name, value in _of_prompt(values[kept], told, samples).items():
                found[name].append(value)
    return {name: float(np.mean(told)) for name, told in found.items()}


def _of_prompt(values: np.ndarray, votes: np.ndarray | None, samples: int) -> Metrics:
    metrics = {f"mean@{samples}": float(values.mean())}
    if samples > 1:
        metrics[f"std@{samples}"] = float(values.std())
    for size in sizes(samples):
        k = min(size, len(values))
        told = {f"best@{size}": expected_extreme(values, k, largest=True)}
        told[f"worst@{size}"] = expected_extreme(values, k, largest=False)
        if votes is not None:
            told[f"maj@{size}"] = expected_majority(values, votes, k)
        for name, (mean, std) in told.items():
            metrics[f"{name}/mean"] = mean
            if size < samples:
                metrics[f"{name}/std"] = std
    return metrics


def _numbered(votes: np.ndarray) -> np.ndarray:
    """Equal answers by equal numbers; None is like no text."""
    texts = [None if vote is None else str(vote) for vote in votes]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return np.array([numbers[text] for text in texts])
