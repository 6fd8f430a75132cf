"""Metrics of a step from those of its rounds or mini-batches: sums, extremes, or means over rows."""

from __future__ import annotations

import pytest
from documented_metrics import undocumented

from megarl.trainer.records.metrics import combine_metrics


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("num_turns/mean", 3.0),  # (1 x 1.0 + 3 x 3.0 + 2 x 4.0) / 6 rows
        ("actor/pg_loss", 3.0),
        ("critic/score/max", 4.0),
        ("num_turns/min", 1.0),
        ("training/off_policy/trajectory_staleness_worst", 4.0),
        ("training/off_policy/trajectory_staleness", 3.0),
        ("rollout_corr/rollout_is_max", 4.0),
        ("rollout_corr/log_ppl_diff_min", 1.0),
        ("perf/critic/max_memory_allocated_gb", 4.0),
        ("actor/update_micro_batch_limit", 1.0),
        ("reward/failed", 8.0),
        ("rollout/requests_moved", 8.0),
        ("actor/skipped_steps", 8.0),
        ("state_tokens/total", 8.0),
        ("endpoint/requests", 8.0),
    ],
)
def test_reduction_of_a_metric(name: str, expected: float) -> None:
    assert combine_metrics([({name: 1.0}, 1), ({name: 3.0}, 3), ({}, 9), ({name: 4.0}, 2)]) == {name: expected}
    assert combine_metrics([({name: 7.0}, 5)]) == {name: 7.0}
    assert undocumented([name]) == []
