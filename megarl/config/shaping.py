"""`algorithm.ref_quality_score` and `algorithm.repr_align`: what the reference policy adds to the reward."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.keys import key, section
from megarl.config.problems import Problem

if TYPE_CHECKING:
    from megarl.config.schema import TrainConfig

SCHEDULES = ("linear", "sigmoid", "cosine", "exp", "step", "constant")
QUALITY, ALIGN = "algorithm.ref_quality_score", "algorithm.repr_align"
ALIGNMENT = f"{ALIGN}.ref_alignment"


@dataclass
class ScheduledWeightConfig:
    """A weight ``w`` that rises from 0 over a warm-up, and stays."""

    enable: bool = key(False, "Whether there is one.")
    max_weight: float = key(0.0, "Largest w.", at_least=0)
    warmup_ratio: float = key(
        0.7, "Share of the run's training steps over which the weight rises; 0 = none.", at_least=0, at_most=1
    )
    schedule: str = key(
        "linear",
        "How it rises; constant = it does not, it is there from the start.",
        choices=SCHEDULES,
        custom="function",
    )
    steps: int = key(3, "Equal stairs of the rise; read with `schedule=step`.", at_least=1)


@dataclass
class RefQualityConfig(ScheduledWeightConfig):
    """Blend the scores with how likely the reference policy finds the answers (docs/reward_shaping.md)."""

    enable: bool = key(False, "Blend: reward = (1 - w) * score + w * quality.")
    max_weight: float = key(0.3, "Largest w.", at_least=0, at_most=1)


@dataclass
class RefAlignmentConfig(ScheduledWeightConfig):
    """Alignment with the ground truth, as the reference policy represents it and the answer."""

    enable: bool = key(False, "Add w * cosine to the reward, in steps in which the policy's entropy is high.")
    max_weight: float = key(0.2, "Largest w.", at_least=0)
    schedule: str = key(
        "sigmoid",
        "How it rises; constant = it does not, it is there from the start.",
        choices=SCHEDULES,
        custom="function",
    )
    entropy_high_threshold: float = key(
        0.2, "Mean entropy of a step's response tokens, in nats, above which the bonus is given.", at_least=0
    )


@dataclass
class ReprAlignConfig:
    """Reward answers that the reference policy represents like the ground truth (docs/reward_shaping.md)."""

    enable: bool = key(False, "Align representations; what with is told by the section below.")
    ref_alignment: RefAlignmentConfig = section(RefAlignmentConfig)


def shaping_problems(config: TrainConfig) -> Iterator[Problem]:
    """What cannot work about the shaping of rewards by the reference."""
    align = config.algorithm.repr_align
    if align.enable and not align.ref_alignment.enable:
        yield Problem.at(config, f"{ALIGN}.enable", f"there is nothing to align with; set {ALIGNMENT}.enable=true")
    if align.ref_alignment.enable and not align.enable:
        yield Problem.at(config, f"{ALIGNMENT}.enable", f"has no effect without {ALIGN}.enable=true")
    if align.enable and config.algorithm.rollout_correction.bypass_mode:
        text = "needs the policy's entropy, which algorithm.rollout_correction.bypass_mode=true does not compute"
        yield Problem.at(config, f"{ALIGN}.enable", text)
