"""Preference losses: DPO, IPO, SLiC (hinge), SimPO and Bradley-Terry on pairs of responses, KTO on single responses.

In the formulas ``c`` is the chosen response of a pair, ``r`` the rejected one, ``log p(y)`` the log-prob of a response
summed over its tokens, ``q`` the reference, and ``|y|`` the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.policy_loss import TokenLoss
from megarl.base.registry import Registry


@dataclass(frozen=True)
class PreferenceLossOptions:
    """Settings of the preference losses; the defaults are in the configuration's schema.

    Attributes:
        beta: strength of the pull towards the reference; for SimPO the scale of the rewards.
        label_smoothing: probability that a pair's label is wrong, below 0.5 (DPO and SimPO).
        simpo_gamma: target margin between the rewards of SimPO.
    """

    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0


@dataclass(frozen=True)
class PreferenceInputs:
    """Inputs of a preference loss; every tensor is ``[pairs]``.

    Attributes:
        chosen: ``log p(c)``, with gradients.
        rejected: ``log p(r)``, with gradients.
        ref_chosen: ``log q(c)``; None for losses without a reference.
        ref_rejected: ``log q(r)``; None for losses without a reference.
        chosen_tokens: ``|c|``.
        rejected_tokens: ``|r|``.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None
    ref_rejected: Tensor | None
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    options: PreferenceLossOptions = field(kw_only=True)

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return ``log p(y) - log q(y)`` of chosen and rejected responses.

        Raises:
            ValueError: there are no log-probs of a reference.
        """
        if self.ref_chosen is None or self.ref_rejected is None:
            raise ValueError("this preference loss needs the log-probs of a reference")
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected


PreferenceLossFunction = Callable[[PreferenceInputs], TokenLoss]
PREFERENCE_LOSSES: Registry[PreferenceLossFunction] = Registry("loss.type")


@PREFERENCE_LOSSES.register("dpo")
def dpo(inputs: PreferenceInputs) -> TokenLoss:
    """Direct preference optimization: ``-log sigmoid(b h)`` with ``h = log p(c)/q(c) - log p(r)/q(r)``.

    Rafailov et al. 2023 (arXiv:2305.18290), equation 7. With label smoothing ``e`` it is conservative DPO,
    ``-(1 - e) log sigmoid(b h) - e log sigmoid(-b h)`` (Mitchell 2023).
    """
    options = inputs.options
    chosen, rejected = (options.beta * ratio for ratio in inputs.log_ratios())
    return _with_rewards(_smooth_logistic(chosen - rejected, options.label_smoothing), chosen, rejected)


@PREFERENCE_LOSSES.register("hinge")
def slic_hinge(inputs: PreferenceInputs) -> TokenLoss:
    """Hinge loss on DPO's rewards: ``max(0, 1 - b h)``.

    Zhao et al. 2023 (SLiC-HF, arXiv:2305.10425) in the form of Liu et al. 2023 (RSO, arXiv:2309.06657), equation 8.
    """
    chosen, rejected = (inputs.options.beta * ratio for ratio in inputs.log_ratios())
    return _with_rewards(torch.relu(1 - (chosen - rejected)), chosen, rejected)


@PREFERENCE_LOSSES.register("ipo")
def ipo(inputs: PreferenceInputs) -> TokenLoss:
    """Identity preference optimization: ``(h - 1 / (2 b))^2``, with ``h`` of log-ratios averaged over the tokens.

    Azar et al. 2023 (arXiv:2310.12036), equation 17. The average over tokens follows the authors' recommendation to
    TRL: the target ``1 / (2 b)`` then does not depend on the lengths.
    """
    beta = inputs.options.beta
    chosen, rejected = inputs.log_ratios()
    chosen, rejected = chosen / _count(inputs.chosen_tokens), rejected / _count(inputs.rejected_tokens)
    return _with_rewards((chosen - rejected - 1 / (2 * beta)) ** 2, beta * chosen, beta * rejected)


@PREFERENCE_LOSSES.register("simpo")
def simpo(inputs: PreferenceInputs) -> TokenLoss:
    """SimPO: ``-log sigmoid(b log p(c)/|c| - b log p(r)/|r| - g)``, without a reference.

    Meng et al. 2024 (arXiv:2405.14734), equation 6; label smoothing as in :func:`dpo`.
    """
    options = inputs.options
    chosen = options.beta * inputs.chosen / _count(inputs.chosen_tokens)
    rejected = options.beta * inputs.rejected / _count(inputs.rejected_tokens)
    loss = _smooth_logistic(chosen - rejected - options.simpo_gamma, options.label_smoothing)
    return _with_rewards(loss, chosen, rejected)


@dataclass(frozen=True)
class LabelledInputs:
    """Inputs of the loss on single responses; every tensor is ``[n]``.

    Attributes:
        log_ratios: ``log p(y) - log q(y)``, with gradients.
        desirable: whether a response is desirable, bool.
        kl: estimate of the KL from policy to reference, at least 0, a constant.
        beta: strength of the pull towards the reference.
    """

    log_ratios: Tensor
    desirable: Tensor
    kl: float
    beta: float = field(kw_only=True)
    desirable_weight: float = field(kw_only=True)
    undesirable_weight: float = field(kw_only=True)


def kto_kl(log_ratios: Tensor) -> float:
    """Estimate KTO's reference point: the mean log-ratio of responses under prompts of other rows, at least 0.

    Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1: ``z_0 = max(0, mean(log p(y'|x) - log q(y'|x)))``.

    Args:
        log_ratios: ``[n]``, over a step's mismatched pairs of prompt and response.
    """
    return max(0.0, log_ratios.double().mean().item())


def kto(inputs: LabelledInputs) -> TokenLoss:
    """Kahneman-Tversky optimization: ``w (1 - sigmoid(b (h - z)))`` if desirable, else ``w (1 - sigmoid(b (z - h)))``.

    Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1, with ``h = log p(y)/q(y)``, the estimate ``z`` of the KL as
    reference point, and one weight ``w`` for desirable and one for undesirable responses.
    """
    distance = inputs.beta * (inputs.log_ratios - inputs.kl)
    values = torch.sigmoid(torch.where(inputs.desirable, distance, -distance))
    weights = torch.full_like(values, inputs.undesirable_weight).masked_fill(inputs.desirable, inputs.desirable_weight)
    diagnostics = {
        "accuracy": (values.detach() > 0.5).to(values.dtype),
        "reward": inputs.beta * inputs.log_ratios.detach(),
    }
    return TokenLoss(weights * (1 - values), diagnostics)


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
    return _with_rewards(loss, chosen, rejected)


def _count(tokens: Tensor) -> Tensor:
    """Divisor of a mean over tokens: a response that truncation removed has none."""
    return tokens.clamp(min=1)


def _smooth_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    loss = -F.logsigmoid(logits)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-logits)
    return loss


def _with_rewards(loss: Tensor, chosen: Tensor, rejected: Tensor) -> TokenLoss:
    """Add the diagnostics of a loss per pair: the implicit rewards, their margin, and the order of each pair."""
    chosen, rejected = chosen.detach(), rejected.detach()
    diagnostics = {
        "accuracy": (chosen > rejected).to(loss.dtype),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return TokenLoss(loss, diagnostics)
