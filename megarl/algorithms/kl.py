"""KL to the reference per token (k1, k2, k3) and to a teacher, the KL penalty, and its controllers.

Tensors over tokens are rectangles, or with ``lengths`` packed tokens (:mod:`megarl.algorithms.masked`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masked import sequence_means
from megarl.base.registry import Registry

KLFunction = Callable[[Tensor], Tensor]
KL_ESTIMATORS: Registry[KLFunction] = Registry("kl_penalty")


def unclamped_k3(log_ratio: Tensor) -> Tensor:
    """Compute k3 without its clamp to 10; the exponent is bounded by 20."""
    inverse = (-log_ratio).clamp(-20.0, 20.0)
    return inverse.exp() - inverse - 1.0


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _with_k2_gradient(estimate: KLFunction) -> KLFunction:
    """Return the straight-through estimator: the value of ``estimate``, the gradient of k2."""

    def straight_through(log_ratio: Tensor) -> Tensor:
        slope = _k2(log_ratio)
        return estimate(log_ratio.detach()) + slope - slope.detach()

    return straight_through


_ESTIMATES: dict[tuple[str, ...], KLFunction] = {
    ("kl", "k1"): lambda log_ratio: log_ratio,
    ("abs",): torch.abs,
    ("mse", "k2"): _k2,
    ("low_var_kl", "k3"): lambda log_ratio: unclamped_k3(log_ratio).clamp(-10.0, 10.0),
}
for _names, _estimate in _ESTIMATES.items():
    KL_ESTIMATORS.register(*_names)(_estimate)
    KL_ESTIMATORS.register(*(f"{name}+" for name in _names))(_with_k2_gradient(_estimate))


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy.

    With ``d = log_prob - ref_log_prob`` (Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html):

    - ``kl``, ``k1``: ``d``, unbiased, may be negative.
    - ``abs``: ``|d|``.
    - ``mse``, ``k2``: ``d^2 / 2``, low variance, biased.
    - ``low_var_kl``, ``k3``: ``exp(-d) - 1 + d``, unbiased, never negative; clamped to 10, its exponent to 20.

    As a loss, only k2 has the gradient of this KL. The gradient of k1 has mean 0; k3 has the gradient of the
    reverse KL. A "+" after any name (``k1+``, ``abs+``, ``k3+``, ...) keeps the value and uses k2's gradient.

    Args:
        log_prob: any shape; with gradients if used as a loss.

    Raises:
        ConfigError: ``kind`` is unknown.
    """
    return KL_ESTIMATORS[kind](log_prob - ref_log_prob)


def apply_kl_penalty(
    token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, beta: float, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Subtract the KL penalty from the scores: ``r_t = score_t - beta * KL_t`` (Ziegler et al. 2019, eq. 2).

    Args:
        kl: KL from the sampling policy to the reference at each token, estimated by :func:`kl_penalty` or exact.

    Returns:
        The rewards, and the KL of each sequence in nats per token ``[b]``: the mean over its trained tokens, 0 without
        any.
    """
    kept = response_mask.bool()
    kl = torch.where(kept, kl, 0.0)
    return token_level_scores - beta * kl, sequence_means(kl, kept, lengths)


class KLController:
    """Coefficient of the KL penalty; here a constant, which reads neither target nor horizon."""

    def __init__(self, value: float, target_kl: float = 0.0, horizon: int = 1) -> None:
        self.value = value

    def update(self, current_kl: float, num_samples: int) -> None:
        """Update the coefficient with a step's KL (nats per token) and number of samples."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing: a constant comes from the config, so a resumed run may change it."""


KL_CONTROLLERS: Registry[type[KLController]] = Registry("algorithm.kl_ctrl.type")
KL_CONTROLLERS.register("fixed")(KLController)


@KL_CONTROLLERS.register("adaptive")
class AdaptiveKLController(KLController):
    """A coefficient that steers the KL towards a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    ``beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * num_samples / horizon``.

    Args:
        target_kl: target of the KL, in the unit of ``update``'s ``current_kl``; above 0.
        horizon: samples over which the coefficient adapts.
    """

    def __init__(self, value: float, target_kl: float, horizon: int) -> None:
        super().__init__(value)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, num_samples: int) -> None:
        """Increase the coefficient if the KL is above the target, decrease it if below."""
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_samples / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient."""
        self.value = float(state["value"])


class TopKDivergence(NamedTuple):
    """Comparison of two distributions on the teacher's most probable tokens; ``[n]`` each.

    Attributes:
        kl: KL from teacher to student over these tokens, at least 0.
        student_mass: probability of these tokens under the student.
        teacher_mass: the same under the teacher.
    """

    kl: Tensor
    student_mass: Tensor
    teacher_mass: Tensor


def forward_kl_topk(student: Tensor, teacher: Tensor, log_prob_min: float | None = None) -> TopKDivergence:
    """Compute the KL from teacher to student over the teacher's most probable tokens (GKD, arXiv:2306.13649).

    ``sum_v q_v (log q_v - log p_v)`` with teacher ``q`` and student ``p``. The sum leaves out the other tokens, so it
    can be negative, and is then 0 without a gradient.

    Args:
        student: log-probs at the teacher's tokens, ``[n, k]``; with gradients.
        teacher: ``[n, k]``.
        log_prob_min: lower bound of both log-probs; None = none. A bounded log-prob has no gradient.
    """
    student_mass, teacher_mass = student.detach().exp().sum(-1), teacher.exp().sum(-1)
    if log_prob_min is not None:
        student, teacher = student.clamp(min=log_prob_min), teacher.clamp(min=log_prob_min)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    return TopKDivergence(kl.clamp(min=0), student_mass, teacher_mass)
