"""Balance of rows over ranks: Karmarkar-Karp differencing, as in other trainers, against megarl's plans.

    python benchmarks/balance.py

Lengths are log-normal (median 1,024 tokens, sigma 1, at most 8,192). A sequence of L tokens costs 24,576 L + L^2, as in
a dense transformer of width 4,096. Each case is solved for several seeds. The first table shows the cost of the most
expensive part over the mean, for the first seed and the worst of all seeds. The second table shows the time of an
update that waits for its slowest rank after every mini-batch, over perfect balance and over the bound of each
mini-batch's mean and largest sequence. Time is that of the slowest seed. Memory is the peak of Python's and numpy's
allocations for one plan. Differencing keeps all parts of every candidate; cases with more than ``--baseline-cells``
numbers are skipped.
"""

from __future__ import annotations

import heapq
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

# One thread for every library, those included that read this at import.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from machine import benchmark_parser, parse_sizes

from megarl.data import balance_mini_batches, balanced_partition, stratified_minibatch_order
from megarl.data.balance import makespan_lower_bound

Parts = list[list[int]]
MEDIAN, SIGMA, LONGEST, LINEAR = 1024, 1.0, 8192, 24576


def lengths_of(rows: int, seed: int) -> np.ndarray:
    """Draw the tokens of each row."""
    draws = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, rows)
    return np.clip(draws, 1, LONGEST).astype(np.int64)


def costs_of(lengths: np.ndarray) -> np.ndarray:
    """Return the cost of each row."""
    tokens = lengths.astype(np.float64)
    return LINEAR * tokens + tokens**2


def differencing(costs: np.ndarray, k: int, equal: bool) -> Parts:
    """Divide costs into ``k`` parts by the largest differencing method (Karmarkar-Karp); the baseline."""
    order = np.argsort(-costs, kind="stable").tolist()
    ties = count()
    heap: list[tuple[float, int, np.ndarray, Parts]] = []
    step = k if equal else 1
    for start in range(0, len(order), step):
        parts = [[item] for item in order[start : start + step]] + [[] for _ in range(k - step)]
        sums = np.array([costs[part].sum() for part in parts])
        heapq.heappush(heap, (sums[-1] - sums[0], next(ties), sums, parts))
    while len(heap) > 1:
        (_, _, sums, parts), (_, _, others, more) = heapq.heappop(heap), heapq.heappop(heap)
        sums = sums + others[::-1]
        parts = [mine + theirs for mine, theirs in zip(parts, reversed(more), strict=True)]
        ranking = np.argsort(-sums, kind="stable")
        sums, parts = sums[ranking], [parts[index] for index in ranking]
        heapq.heappush(heap, (sums[-1] - sums[0], next(ties), sums, parts))
    return heap[0][3]


class Case(NamedTuple):
    """Rows and ranks, with a target."""

    rows: int
    ranks: int
    equal: bool
    target: float | None

    def describe(self) -> str:
        """Return the text of the table's first column."""
        return f"{self.rows:,} x {self.ranks}, {'equal' if self.equal else 'free'} counts"


CASES = (
    Case(1024, 64, True, 1.002),
    *(Case(rows, ranks, False, 1.001) for rows, ranks in ((1024, 8), (16384, 8), (16384, 64), (16384, 512))),
    *(Case(131072, ranks, False, 1.001) for ranks in (8, 64, 512)),
    Case(1024, 512, True, None),
)


class Measured(NamedTuple):
    """Result of a solver on the seeds of a case: max/mean per seed, slowest seconds, peak megabytes."""

    ratios: list[float]
    seconds: float
    megabytes: float

    def __str__(self) -> str:
        return f"{self.ratios[0]:7.4f} {max(self.ratios):7.4f} {self.seconds:8.3f} s {self.megabytes:7.1f} MB"


def measure(solve: Callable[[np.ndarray], Parts], batches: list[np.ndarray]) -> Measured:
    """Solve every batch twice: once for the time, once for the memory."""
    ratios, seconds, peaks = [], [], []
    for costs in batches:
        start = time.perf_counter()
        parts = solve(costs)
        seconds.append(time.perf_counter() - start)
        ratios.append(worst(costs, parts) / (costs.sum() / len(parts)))
        assert sorted(item for part in parts for item in part) == list(range(len(costs)))
        if costs is batches[0]:  # tracing is slow
            tracemalloc.start()
            solve(costs)
            peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
            tracemalloc.stop()
    return Measured(ratios, max(seconds), max(peaks))


def worst(costs: np.ndarray, parts: Parts) -> float:
    """Return the cost of the most expensive part."""
    return max(float(costs[part].sum()) for part in parts)


def partitions(seeds: int, cells: int) -> bool:
    """Print the first table; return whether all targets are reached."""
    print(f"max/mean cost: seed 0, worst of {seeds} seeds; time; memory")
    print(f"  {'rows x ranks':<30}{'Karmarkar-Karp':^38}  {'megarl':^38}  to reach")
    reached = True
    for case in CASES:
        batches = [costs_of(lengths_of(case.rows, seed)) for seed in range(seeds)]
        ours = measure(partial(balanced_partition, k=case.ranks, equal_size=case.equal), batches)
        held = case.rows * (1 if case.equal else case.ranks)
        theirs = "left out: too large"
        if held <= cells:
            theirs = str(measure(partial(differencing, k=case.ranks, equal=case.equal), batches))
        bounds = [makespan_lower_bound(c, case.ranks, fixed_sizes=case.equal) * case.ranks / c.sum() for c in batches]
        targets = [case.target or bound * 1.0001 for bound in bounds]
        good = all(ratio <= target for ratio, target in zip(ours.ratios, targets, strict=True))
        good = good and ours.megabytes < 1024
        reached &= good
        goal = f"{case.target}" if case.target else f"bound {bounds[0]:.4f}"
        print(f"  {case.describe():<30}{theirs:^38}  {ours!s:^38}  {goal} {'yes' if good else 'NO'}")
    return reached


class Update(NamedTuple):
    """Mini-batches of 1,024 rows, in sequence on all ranks."""

    mini_batches: int
    ranks: int
    target: float
    over_bound: bool  # over what each mini-batch's mean or largest sequence allows, instead of over the mean


UPDATES = (Update(4, 16, 1.02, False), Update(8, 32, 1.02, True))


def updates(seeds: int) -> bool:
    """Print the second table; return whether all targets are reached."""
    reached = True
    for update in UPDATES:
        bound = "the bound of the largest sequences" if update.over_bound else "perfect"
        print(f"\n{update.mini_batches} mini-batches of 1,024 rows on {update.ranks} ranks, {seeds} seeds")
        print(f"  {'':<46}{'over the mean':>14}{'over the bound':>15}{'K-S distance, worst':>21}")
        results: dict[str, list[tuple[float, float, float]]] = {}
        for seed in range(seeds):
            for name, (costs, lengths, ranks) in plans(update, lengths_of(1024, seed)).items():
                results.setdefault(name, []).append(judge(update, costs, lengths, ranks))
        for name, rows in results.items():
            mean, over, _ = (statistics.mean(values) for values in zip(*rows, strict=True))
            distance = max(row[2] for row in rows)
            print(f"  {name:<46}{mean:>14.4f}{over:>15.4f}{distance:>21.4f}")
        ours = results["megarl, free counts (token budget)"]
        good = all(row[1 if update.over_bound else 0] <= update.target and row[2] <= 0.1 for row in ours)
        reached &= good
        print(f"  to reach, every seed: {update.target} over {bound}, distance 0.1: {'yes' if good else 'NO'}")
    return reached


Waiting = list[list[float]]
"""Cost of each rank in each mini-batch."""


def plans(update: Update, lengths: np.ndarray) -> dict[str, tuple[np.ndarray, list[np.ndarray], Waiting]]:
    """Return per plan: all costs, the lengths of each mini-batch, and the cost of each rank per mini-batch."""
    count_, dp = update.mini_batches, update.ranks
    size, costs = len(lengths) // count_, costs_of(lengths)
    slices = [np.arange(start, start + size) for start in range(0, len(lengths), size)]
    whole = [sorted(part) for part in differencing(costs, dp, True)]
    cut = [[part[size // dp * i : size // dp * (i + 1)] for part in whole] for i in range(count_)]
    each = [[[rows[i] for i in part] for part in differencing(costs[rows], dp, True)] for rows in slices]
    order = np.array(stratified_minibatch_order(lengths.tolist(), count_))
    megarl_plans = {
        equal: [
            [order[part].tolist() for part in parts] for parts in balance_mini_batches(costs[order], count_, dp, equal)
        ]
        for equal in (True, False)
    }
    named = {
        "Karmarkar-Karp over all rows, then cut": cut,
        "Karmarkar-Karp in each mini-batch": each,
        "megarl, equal counts": megarl_plans[True],
        "megarl, free counts (token budget)": megarl_plans[False],
    }
    return {
        name: (
            costs,
            [lengths[[row for part in parts for row in part]] for parts in mini_batches],
            [[float(costs[part].sum()) for part in parts] for parts in mini_batches],
        )
        for name, mini_batches in named.items()
    }


def judge(update: Update, costs: np.ndarray, lengths: list[np.ndarray], ranks: Waiting) -> tuple[float, float, float]:
    """Return time over the mean, time over the bound, and the largest distance between mini-batch lengths."""
    taken = sum(map(max, ranks))
    bound = sum(makespan_lower_bound(costs_of(mini_batch), update.ranks, fixed_sizes=False) for mini_batch in lengths)
    pairs = [(a, b) for index, a in enumerate(lengths) for b in lengths[:index]]
    return taken * update.ranks / costs.sum(), taken / bound, max(distance(a, b) for a, b in pairs)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance between two samples."""
    points = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def main() -> None:
    """Print the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="batches per case (default: %(default)s)")
    parser.add_argument("--baseline-cells", type=int, default=1 << 18, help="default: %(default)s")
    arguments = parse_sizes(parser, seeds=1, baseline_cells=1 << 10)
    good = partitions(arguments.seeds, arguments.baseline_cells) & updates(arguments.seeds)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
