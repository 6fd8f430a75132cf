"""Bounds of the rollout correction as numbers, parsed from `algorithm.rollout_correction`."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from megarl.config.schema.algorithm import RolloutCorrectionConfig

SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
REJECTION_OPTIONS = tuple(
    f"{scope}_{k}" for scope in SCOPES for k in ("k1", "k2", "k3") if (scope, k) != ("seq_max", "k1")
)
EARLIER_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Earlier names of verl for some of the options."""


class UnknownRejection(ValueError):
    """`rollout_rs` has an option that does not exist."""


class WeightBounds(NamedTuple):
    """Bounds as a key holds them; ``lower`` is None for a single number."""

    lower: float | None
    upper: float


class RejectionRule(NamedTuple):
    """One rejection: its current name and the bounds of its ratio (``k1``) or estimate (``k2``, ``k3``)."""

    option: str
    lower: float
    upper: float


def weight_bounds(config: RolloutCorrectionConfig) -> WeightBounds:
    """Parse the bounds of `rollout_is_threshold`.

    Raises:
        ValueError: it is neither one bound nor two; the message shows the right form.
    """
    bounds = _bounds(config.rollout_is_threshold)
    if bounds.upper <= 1 or (bounds.lower is not None and bounds.lower > 1):
        raise ValueError("1, the ratio of equal policies, must be within: write '2.0', or '0.5_5.0' in quotes")
    return bounds


def rejection_rules(config: RolloutCorrectionConfig) -> list[RejectionRule]:
    """Parse the options of `rollout_rs` with their bounds; empty without rejection.

    Raises:
        UnknownRejection: an option is unknown.
        ValueError: the bounds do not fit; the message shows the right form.
    """
    options = [EARLIER_NAMES.get(name, name) for name in _entries(config.rollout_rs)]
    for option in options:
        if option not in REJECTION_OPTIONS:
            raise UnknownRejection(f"{option!r} is not known; known are {', '.join(REJECTION_OPTIONS)}")
    bounds = _entries(config.rollout_rs_threshold)
    if options and len(bounds) not in (1, len(options)):
        raise ValueError(f"needs bounds: one for all {len(options)} options of rollout_rs, or one for each")
    return [_rule(option, _bounds(text)) for option, text in zip(options, bounds * len(options), strict=False)]


def _rule(option: str, bounds: WeightBounds) -> RejectionRule:
    if not option.endswith("k1"):
        if bounds.lower is not None:
            raise ValueError(f"{option} has one bound, from above")
        return RejectionRule(option, 0.0, bounds.upper)
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    if not lower <= 1 <= bounds.upper:
        raise ValueError(f"1, the ratio of equal policies, must be within for {option}: write '0.5_2.0' in quotes")
    return RejectionRule(option, lower, bounds.upper)


def _entries(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _bounds(text: str) -> WeightBounds:
    try:
        *lower, upper = (float(part) for part in text.split("_"))
    except ValueError:
        raise ValueError(f"{text!r} is not a number, or two as '0.5_2.0'") from None
    if len(lower) > 1 or not all(a < b for a, b in pairwise([0.0, *lower, upper, math.inf])):
        raise ValueError(f"{text!r} must be a number above 0, or two that rise, as '0.5_2.0'")
    return WeightBounds(lower[0] if lower else None, upper)
