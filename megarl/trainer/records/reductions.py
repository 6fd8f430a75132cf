"""Reduction of metrics over the parts of a step: rounds of dynamic sampling, or mini-batches of a sync interval."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from megarl.trainer.records.metrics import Metrics

SUMMED = (
    "*/out_of_memory",
    "*/skipped_steps",
    "agent/failed",
    "best_of_n/masked",
    "distillation/rows/*",
    "distillation/retries/*",
    *(f"endpoint/{name}" for name in ("requests", "refused", "unserved", "cut_off", "tokens")),
    *(f"reward/{name}" for name in ("failed", "bad_samples", "timeouts", "infrastructure_failures", "retries")),
    *("reward/processes_replaced", "reward/rm_truncated", "reward_baselines/failed"),
    *(f"rollout/{name}" for name in ("replicas_lost", "runners_lost", "requests_moved", "idle_while_waiting_s")),
    "fully_async/partial/total_partial_num",
    "state_tokens/total",
)
"""Patterns of counts and seconds, which add up over the parts."""
LARGEST = ("*/max", "*/max_partial_span", "*_max", "*_worst", "*/max_memory_allocated_gb")
SMALLEST = ("*/min", "*_min", "*_micro_batch_limit")
"""Patterns of extremes. All other metrics are means over rows."""


def combine_metrics(parts: Sequence[tuple[Metrics, int]]) -> Metrics:
    """Combine the metrics of the parts of a step: sums, extremes, else means weighted by rows.

    Args:
        parts: metrics and number of rows of each part; a part without a metric does not count in it.
    """
    if len(parts) == 1:
        return dict(parts[0][0])
    names = dict.fromkeys(name for metrics, _ in parts for name in metrics)
    return {name: _reduced(name, [(part[name], rows) for part, rows in parts if name in part]) for name in names}


def _reduced(name: str, weighted: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in weighted]
    for reduce, patterns in ((sum, SUMMED), (max, LARGEST), (min, SMALLEST)):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return reduce(values)
    return sum(value * rows for value, rows in weighted) / max(sum(rows for _, rows in weighted), 1)
