"""Where a difference between two lists of log-probs comes from, told by a third: arithmetic on arrays, no models.

Each side, engine and actor, is compared with what plain transformers make of the weights that both should have had. A
side that differs is explained by the first of these that fits: another temperature; other weights, where the
difference is larger than rounding; another number format, where the side is said to compute in bfloat16 or the
difference has the pattern of bfloat16's errors; what is as small as rounding and neither of these is the kernels'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

AGREES = 1e-4
"""Mean absolute difference of log-probs, in nats, up to which two computations in float32 are the same."""
EXPLAINED = 0.3
"""A temperature explains a difference where it leaves no more than this share of it."""
ALIKE, SIGNIFICANT = 0.25, 3.0
"""A side's differences are bfloat16's errors from this correlation on, if it is so many times what chance makes."""
ROUNDING = 4.0
"""A difference of more than so many times what bfloat16 makes is not rounding."""
SAME_TEMPERATURE = 0.02
"""Relative difference up to which two temperatures are the same."""

LogProbsAt = Callable[[Sequence[float]], np.ndarray]
"""From temperatures to log-probs ``[temperatures, tokens]``."""


class Cause(Enum):
    """What makes a side differ from transformers."""

    NONE = "none"
    TEMPERATURE = "temperature"
    DTYPE = "dtype"
    WEIGHTS = "weights"
    KERNELS = "kernels"


@dataclass(frozen=True)
class Finding:
    """What is known of one side.

    Attributes:
        cause: why it differs.
        difference: mean absolute difference to float32 at the run's temperature, in nats.
        rounded: the same to bfloat16.
        alike: correlation of the side's differences to float32 with those of bfloat16, -1 to 1.
        temperature: at which float32 is nearest to the side.
        remaining: mean absolute difference at that temperature.
    """

    cause: Cause
    difference: float
    rounded: float
    alike: float
    temperature: float
    remaining: float


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a dump.

    Attributes:
        engine: the engine's side.
        actor: the actor's side.
        between: mean absolute difference of the two sides, in nats.
        largest: the largest.
        signed: mean of the engine's log-prob less the actor's: an estimate of the KL.
        k3: the estimate that is never negative.
        rounding: what bfloat16 makes: mean absolute difference of transformers in both formats.
        tokens: how many were compared.
    """

    engine: Finding
    actor: Finding
    between: float
    largest: float
    signed: float
    k3: float
    rounding: float
    tokens: int


def diagnose(
    engine: np.ndarray,
    actor: np.ndarray,
    temperature: float,
    exact: LogProbsAt,
    rounded: np.ndarray,
    in_bfloat16: tuple[bool, bool] = (False, False),
) -> Diagnosis:
    """Compare both sides with a third computation of the same tokens.

    Args:
        engine: the engine's log-probs, ``[tokens]``.
        actor: the actor's.
        temperature: of the run.
        exact: transformers in float32, at any temperature.
        rounded: transformers in bfloat16 at the run's temperature, ``[tokens]``.
        in_bfloat16: whether engine and actor are said to compute in it.
    """
    reference = exact([temperature])[0]
    rounding = _distance(rounded, reference)
    log_ratio = actor - engine
    return Diagnosis(
        engine=_examine(engine, temperature, reference, exact, rounded, in_bfloat16[0]),
        actor=_examine(actor, temperature, reference, exact, rounded, in_bfloat16[1]),
        between=_distance(engine, actor),
        largest=float(np.abs(log_ratio).max()),
        signed=float(-log_ratio.mean()),
        k3=float((np.exp(np.clip(log_ratio, -20, 20)) - 1 - log_ratio).mean()),
        rounding=rounding,
        tokens=len(engine),
    )


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).mean())


def _examine(
    side: np.ndarray,
    temperature: float,
    reference: np.ndarray,
    exact: LogProbsAt,
    rounded: np.ndarray,
    in_bfloat16: bool,
) -> Finding:
    difference, to_rounded = _distance(side, reference), _distance(side, rounded)
    alike = _correlation(side - reference, rounded - reference)
    if difference <= AGREES:
        return Finding(Cause.NONE, difference, to_rounded, alike, temperature, difference)
    best, remaining = _nearest_temperature(side, temperature, exact)
    if abs(best / temperature - 1) > SAME_TEMPERATURE and remaining <= EXPLAINED * difference:
        cause = Cause.TEMPERATURE
    elif difference > ROUNDING * _distance(rounded, reference):
        cause = Cause.WEIGHTS
    else:
        pattern = alike >= max(ALIKE, SIGNIFICANT / len(side) ** 0.5)
        cause = Cause.DTYPE if in_bfloat16 or pattern else Cause.KERNELS
    return Finding(cause, difference, to_rounded, alike, best, remaining)


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one - one.mean(), other - other.mean()
    scale = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum()) / scale if scale > 0 else 0.0


def _nearest_temperature(side: np.ndarray, temperature: float, exact: LogProbsAt) -> tuple[float, float]:
    """The temperature at which float32 is nearest to a side, by two scans, and the difference that is left there."""
    grid = np.geomspace(temperature / 5, temperature * 5, 49)
    for _ in range(2):
        distances = np.abs(exact(grid.tolist()) - side).mean(axis=1)
        at = int(distances.argmin())
        best, remaining = float(grid[at]), float(distances[at])
        grid = np.geomspace(grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)], 17)
    return best, remaining
