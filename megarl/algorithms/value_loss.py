"""Losses of the critic (per token) and of reward models (per pair of responses)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.policy_loss import TokenLoss


def clipped_value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange_value: float) -> TokenLoss:
    """Compute a critic's clipped squared error (PPO): no gradient for values far from the old ones.

    ``0.5 * max((v - G)^2, (clip(v, V - c, V + c) - G)^2)``, as in the reference implementation of Schulman et al. 2017.
    Tensors are rectangles ``[b, R]`` or packed tokens ``[n]``.

    Args:
        vpreds: current values, ``v``, with gradients.
        values: values before this step's updates, ``V``.
        returns: regression targets, ``G``.
        cliprange_value: ``c``.

    Returns:
        The loss, with diagnostics ``vf_clipfrac`` (1 if the clip removed the gradient) and ``vpred_mean``.
    """
    clipped_values = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain, clipped = (vpreds - returns) ** 2, (clipped_values - returns) ** 2
    return TokenLoss(
        loss=0.5 * torch.maximum(plain, clipped),
        diagnostics={"vf_clipfrac": (clipped > plain).to(plain.dtype), "vpred_mean": vpreds.detach()},
    )


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, center_coefficient: float = 0.0
) -> TokenLoss:
    """Compute the Bradley-Terry loss: negative log-likelihood that the chosen response wins, per pair.

    ``-log sigmoid(r_c - r_r - m) + c * (r_c + r_r)^2``: Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin
    ``m`` is that of Touvron et al. 2023 (arXiv:2307.09288), equation 2; the second term, which keeps rewards around
    zero, is that of Eisenstein et al. 2023 (arXiv:2312.09244).

    Args:
        chosen: rewards of the better responses, ``r_c``, ``[pairs]``.
        rejected: rewards of the worse responses, ``r_r``.
        margins: required differences, ``m``; None = 0.
        center_coefficient: ``c``.

    Returns:
        The loss, with diagnostics ``accuracy`` (1 if the chosen response has the larger reward), ``margin``
        (``r_c - r_r``), ``chosen_reward`` and ``rejected_reward``.
    """
    difference = chosen - rejected
    loss = -F.logsigmoid(difference if margins is None else difference - margins)
    if center_coefficient:
        loss = loss + center_coefficient * (chosen + rejected) ** 2
    diagnostics = {
        "accuracy": (difference > 0).to(loss.dtype),
        "margin": difference.detach(),
        "chosen_reward": chosen.detach(),
        "rejected_reward": rejected.detach(),
    }
    return TokenLoss(loss=loss, diagnostics=diagnostics)
