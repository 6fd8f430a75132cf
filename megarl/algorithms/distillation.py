"""On-policy distillation: divergences between the distributions of a teacher and of the policy, its student."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
        student: log-probs of the student at the teacher's tokens, ``[n, k]``; with gradients.
        teacher: log-probs of the teacher, ``[n, k]``.
        log_prob_min: lower bound of both log-probs; None = none. A bounded log-prob has no gradient.
    """
    student_mass, teacher_mass = student.detach().exp().sum(-1), teacher.exp().sum(-1)
    if log_prob_min is not None:
        student, teacher = student.clamp(min=log_prob_min), teacher.clamp(min=log_prob_min)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    return TopKDivergence(kl.clamp(min=0), student_mass, teacher_mass)
