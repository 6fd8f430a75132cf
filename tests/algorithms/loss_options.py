"""Settings of policy losses for the tests; the defaults of a run are in the configuration's schema."""

from __future__ import annotations

from typing import Any

from megarl.algorithms import PolicyLossOptions


def loss_options(**changes: Any) -> PolicyLossOptions:
    """Settings with a few changed ones."""
    values: dict[str, Any] = {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "clip_cov_ratio": 0.0002,
        "clip_cov_lb": 1.0,
        "clip_cov_ub": 5.0,
        "kl_cov_ratio": 0.0002,
        "ppo_kl_coef": 0.1,
        "m2_threshold": 0.04,
    }
    return PolicyLossOptions(**{**values, **changes})
