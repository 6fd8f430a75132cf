"""Loss of the critic, one number per token, on rectangles ``[b, R]`` and packed tokens ``[n]`` alike."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_loss import TokenLoss


def clipped_value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange_value: float) -> TokenLoss:
    """Squared error that gives no gradient to a value that ran away from the old one.

    ``0.5 * max((v - G)^2, (clip(v, V - c, V + c) - G)^2)``, as in the reference implementation of Schulman et al. 2017.

    Args:
        vpreds: values of the critic that learns, ``v``; gradients flow into it.
        values: values before this step's updates, ``V``.
        returns: what the values should have been, ``G``.
        cliprange_value: ``c``.

    Returns:
        The loss, with diagnostics ``vf_clipfrac`` (1 where the clip took the gradient away) and ``vpred_mean``.
    """
    kept_near = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain, clipped = (vpreds - returns) ** 2, (kept_near - returns) ** 2
    return TokenLoss(
        loss=0.5 * torch.maximum(plain, clipped),
        diagnostics={"vf_clipfrac": (clipped > plain).to(plain.dtype), "vpred_mean": vpreds.detach()},
    )
