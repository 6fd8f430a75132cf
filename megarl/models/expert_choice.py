"""Choice of experts: scores, selection and weights of a token's experts, in the trainer and in the embedded engine.

All computation is in float32, as in transformers: a rounded score selects other experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.model_config import Experts


def score_experts(logits: Tensor, experts: Experts) -> Tensor:
    """Compute the score of each expert, ``[tokens, experts]`` float32, from the router's logits."""
    return logits.softmax(-1) if experts.score == "softmax" else logits.sigmoid()


def choose_experts(scores: Tensor, experts: Experts, correction: Tensor | None = None) -> Tensor:
    """Select the experts of each token: ``[tokens, per token]`` indices.

    Args:
        scores: ``[tokens, experts]`` float32.
        correction: ``[experts]``, added to the scores for the selection only.
    """
    with torch.no_grad():
        ranking = scores if correction is None else scores + correction
        if experts.groups_per_token < experts.groups:
            grouped = ranking.unflatten(-1, (experts.groups, -1))
            best = (
                grouped.topk(experts.group_best, dim=-1).values.sum(-1).topk(experts.groups_per_token, dim=-1).indices
            )
            excluded = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter(1, best, False)
            ranking = grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)
        return ranking.topk(experts.per_token, dim=-1).indices


def weigh_experts(scores: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Compute the weights of the selected experts, ``[tokens, per token]``, differentiable in the scores."""
    weights = scores.gather(1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * experts.scaling
