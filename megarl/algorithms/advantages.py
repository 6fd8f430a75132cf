"""Advantage estimators: the registry, and the estimators over per-token returns (GAE, REINFORCE++, ReMax, RFT).

An estimator maps :class:`AdvantageInputs` to ``(advantages, returns)``, both 0 outside the response mask. megarl's own
estimators read packed tokens ``[n]``, a user's reads padded tensors ``[b, R]``; :class:`AdvantageEstimator` converts.
Estimators with group baselines (GRPO, RLOO, ...) are in :mod:`megarl.algorithms.group_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import (
    expand_to_tokens,
    flat_tokens,
    full_precision,
    kept_before,
    masked_whiten,
    select_tokens,
    sequence_counts,
)
from megarl.base.algorithm_names import ADV_ESTIMATORS
from megarl.base.registry import Registry
from megarl.base.user_code import load_user_function


@dataclass(frozen=True)
class Turns:
    """Turns of a batch of responses.

    Attributes:
        numbers: turn of each response token, from 0, ``[b, R]`` or packed ``[n]`` int64; see
            :func:`megarl.algorithms.group_advantages.turn_numbers`.
        anchors: ``[b, T]`` int64, equal for turns of one prompt that begin in the same state; -1 for rows with fewer
            turns.
    """

    numbers: Tensor
    anchors: Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator.

    Tensors ``[b, R]`` are padded; with ``lengths``, they are packed tokens ``[n]`` instead (see
    :mod:`megarl.algorithms.masked`). A user's estimator gets padded tensors, unless it ``reads_packed``. Padded tensors
    are copies, which a function may overwrite; packed tokens belong to the batch.

    Attributes:
        token_level_rewards: ``[b, R]``, the reward of each response token. A reward on a token outside the mask belongs
            to the trained token before it.
        response_mask: ``[b, R]``, 1 for trained tokens. A row without a trained token is a dropped sample (a failed
            reward, for example) and takes part in no statistic.
        values: ``[b, R]``, the critic's values; None without a critic.
        group_ids: ``[b]``, equal for the responses to one prompt; None if the estimator uses no groups.
        reward_baselines: ``[b]``, the score of the prompt's greedy response; None without baselines.
        trained_counts: ``[b]``, trained tokens of each response; None = as many as in ``response_mask``. Estimators of
            the scope ``groups`` read it: they get the sum of a response's rewards as that of one token.
        old_log_probs: ``[b, R]``, log-probs under the actor before the update; None if the estimator reads none.
        sum_pi_squared: ``[b, R]``, sum of the actor's squared probabilities over the vocabulary; None if not computed.
        rollout_is_weights: ``[b, R]``, importance weights of rollout correction, for estimators that need
            ``sum_pi_squared``; None without them.
        turns: turns of multi-turn responses, for estimators that need them; else None.
        step_advantage_w: weight of GiGPO's comparison of turns.
        gamma: discount per token; GiGPO: per turn.
        lam: lambda of GAE.
        norm_by_std: whether GRPO, its pass@k form and GiGPO divide by the standard deviation of a group.
        lengths: ``[b]`` response tokens per row, of packed tokens; None = padded tensors.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    values: Tensor | None = None
    group_ids: np.ndarray | None = None
    reward_baselines: Tensor | None = None
    trained_counts: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    turns: Turns | None = None
    step_advantage_w: float = 1.0
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    lengths: Tensor | None = None

    def in_full_precision(self) -> AdvantageInputs:
        """Convert all numbers to their widest type, at least float32."""
        columns = self._token_columns() | {"reward_baselines": self.reward_baselines}
        numbers = {name: x for name, x in columns.items() if x is not None and x.is_floating_point()}
        changed: dict[str, Any] = dict(zip(numbers, full_precision(*numbers.values()), strict=True))
        return replace(self, **changed)

    def packed(self) -> AdvantageInputs:
        """View padded tensors as packed tokens: all rows have R tokens then."""
        if self.lengths is not None:
            return self
        columns: dict[str, Any] = {name: flat_tokens(tensor, None)[0] for name, tensor in self._token_columns().items()}
        _, lengths = flat_tokens(self.response_mask, None)
        turns = None if self.turns is None else replace(self.turns, numbers=self.turns.numbers.reshape(-1))
        return replace(self, **columns, turns=turns, lengths=lengths)

    def padded(self) -> AdvantageInputs:
        """Pad packed tokens to ``[b, R]``; R is the longest response."""
        if self.lengths is None:
            return self
        columns: dict[str, Any] = {name: self._pad(tensor) for name, tensor in self._token_columns().items()}
        columns["response_mask"] = columns["response_mask"].long()
        turns = None if self.turns is None else replace(self.turns, numbers=self._pad(self.turns.numbers, -1))
        return replace(self, **columns, turns=turns, lengths=None)

    def like_tokens(self, result: Tensor) -> Tensor:
        """Convert a result of :meth:`packed` or :meth:`padded` inputs back to the form of these inputs."""
        if result.dim() == self.token_level_rewards.dim():
            return result
        return result.view_as(self.token_level_rewards) if self.lengths is None else result[self._real()]

    def _token_columns(self) -> dict[str, Tensor]:
        columns = {name: getattr(self, name) for name in _TOKEN_COLUMNS}
        return {name: tensor for name, tensor in columns.items() if tensor is not None}

    def _real(self) -> Tensor:
        """Mark the tokens of each row in the padded tensors, ``[b, R]`` bool."""
        assert self.lengths is not None
        return torch.arange(int(self.lengths.max())) < self.lengths[:, None]

    def _pad(self, tokens: Tensor, pad: float = 0) -> Tensor:
        real = self._real()
        return torch.full(real.shape, pad, dtype=tokens.dtype).masked_scatter(real, tokens)


_TOKEN_COLUMNS = (
    "token_level_rewards",
    "response_mask",
    "values",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
)
"""Fields of :class:`AdvantageInputs` with an entry per token."""


AdvantageFunction = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
Scope = Literal["rows", "groups", "group_tokens", "batch"]
"""Data that an estimator needs at once; see :class:`AdvantageEstimator`."""
_INPUT_MEANINGS = {
    "values": "the values of a critic",
    "group_ids": "the prompt of each response",
    "reward_baselines": "the score of each prompt's greedy response",
    "old_log_probs": "the actor's log-probs before the update",
    "turns": "the turns of multi-turn responses",
    "sum_pi_squared": "the actor's squared probabilities, summed over the vocabulary",
}


@dataclass(frozen=True)
class AdvantageEstimator:
    """An estimator function together with the optional inputs that it requires.

    Attributes:
        needs: required fields of :class:`AdvantageInputs` among the fields that may be None.
        reads_packed: whether the function reads packed tokens and returns them; else padded tensors.
        scope: ``rows``: the result of a row depends on that row only, so that processes estimate their rows
            independently. ``groups``: all trained tokens of a row have one advantage, equal to the return, which
            depends on the sums of the rewards of all rows. ``group_tokens``: the result of a row depends on the tokens
            of its group only, so that processes estimate groups independently. ``batch``: the function gets the tokens
            of all rows.
        whitens: whether the advantages are whitened over all trained tokens of the batch after the function.
    """

    name: str
    function: AdvantageFunction
    needs: tuple[str, ...] = ()
    reads_packed: bool = False
    scope: Scope = "batch"
    whitens: bool = False

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns of a batch, each in the form of the inputs: ``[b, R]`` or packed ``[n]``.

        Numbers are converted to the widest type among them, at least float32, before the function.

        Raises:
            ValueError: the inputs lack a required field.
        """
        advantages, returns = self.unwhitened(inputs)
        if self.whitens:
            advantages = masked_whiten(advantages, inputs.response_mask)
        return advantages, advantages if self.scope == "groups" else returns

    def unwhitened(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns like a call, without the whitening that follows the function.

        Raises:
            ValueError: the inputs lack a required field, or the function has changed packed tokens in place.
        """
        for field in self.needs:
            if getattr(inputs, field) is None:
                raise ValueError(f"advantage estimator {self.name!r} needs `{field}`: {_INPUT_MEANINGS[field]}")
        inputs = inputs.in_full_precision()
        read = inputs.packed() if self.reads_packed else inputs.padded()
        columns = read._token_columns() if self.reads_packed else {}
        versions = {name: tensor._version for name, tensor in columns.items() if not tensor.is_inference()}
        advantages, returns = self.function(read)
        changed = [name for name, version in versions.items() if columns[name]._version != version]
        if changed:
            raise ValueError(f"advantage estimator {self.name!r} changes {changed} in place; clone them first")
        return inputs.like_tokens(advantages), inputs.like_tokens(returns)


def _load_user_estimator(spec: str, key: str) -> AdvantageEstimator:
    function = load_user_function(spec, key, arguments=1)
    return function if isinstance(function, AdvantageEstimator) else AdvantageEstimator(spec, function)


ADVANTAGES: Registry[AdvantageEstimator] = Registry("algorithm.adv_estimator", loader=_load_user_estimator)


def register_advantage(
    *names: str,
    needs: tuple[str, ...] | None = None,
    reads_packed: bool = False,
    scope: Scope = "batch",
    whitens: bool = False,
) -> Callable[[AdvantageFunction], AdvantageEstimator]:
    """Return a decorator that registers an estimator under ``names``.

    Args:
        needs: required inputs; None = those in :mod:`megarl.base.algorithm_names`, none for a custom estimator.
    """
    required = ADV_ESTIMATORS.get(names[0], ()) if needs is None else needs

    def add(function: AdvantageFunction) -> AdvantageEstimator:
        estimator = AdvantageEstimator(names[0], function, required, reads_packed, scope, whitens)
        return ADVANTAGES.register(*names)(estimator)

    return add


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantages (GAE) before whitening (Schulman et al. 2015, arXiv:1506.02438, eq. 11 to 16).

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``. ``t + 1`` is the next token
    of the mask; values and advantages after the last token are 0. A token outside the mask (a tool result, for example)
    is no time step: value and advantage skip it, and its reward belongs to the token of the mask before it.

    Args:
        rewards: ``[b, R]``, or packed ``[n]``, as all tensors over tokens.
        gamma: discount per token.
        lam: 0 = one-step errors, 1 = discounted sum of rewards minus the value.

    Returns:
        Advantages and returns ``A + V``, each ``[b, R]`` in the wider type of rewards and values, at least float32; 0
        outside the mask.
    """
    rewards, values = full_precision(rewards, values)
    kept = mask.bool()
    counts = sequence_counts(kept, lengths)
    ends = counts.cumsum(0)
    steps, value = _step_rewards(rewards, kept, lengths), select_tokens(values, kept)
    next_value = torch.zeros_like(value)
    next_value[:-1] = value[1:]
    next_value[ends[counts > 0] - 1] = 0
    advantage = _backward_sums(steps + gamma * next_value - value, counts, gamma * lam)
    advantages = torch.zeros_like(rewards).masked_scatter_(kept, advantage)
    return advantages, torch.zeros_like(values).masked_scatter_(kept, advantage + value)


def _step_rewards(rewards: Tensor, kept: Tensor, lengths: Tensor | None) -> Tensor:
    """Add the rewards outside the mask to the token of the mask before them; returns ``[n]`` for the kept tokens."""
    (rewards, lengths), (kept, _) = flat_tokens(rewards, lengths), flat_tokens(kept, lengths)
    steps = select_tokens(rewards, kept)
    outside = ~kept & (rewards != 0)
    if outside.any():
        late, steps = outside.nonzero()[:, 0], steps.clone()
        place, first, _ = kept_before(kept, lengths, late)
        follows = place >= first
        steps.index_add_(0, place[follows], rewards[late][follows])
    return steps


def _backward_sums(values: Tensor, counts: Tensor, factor: float) -> Tensor:
    """Compute ``S_t = x_t + factor * S_{t+1}`` within each row of packed values ``[n]``.

    The loop over time touches only rows that have that many tokens, and reads each token once. ``counts`` are the
    tokens per row ``[b]``.
    """
    sums = values.cpu().numpy().copy()
    lengths = counts.cpu().numpy()
    order = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[order]
    active = np.searchsorted(-lengths[order], -np.arange(lengths.max(initial=0)), side="left")
    scale, following = sums.dtype.type(factor), np.empty(0, sums.dtype)
    for distance, rows in enumerate(active.tolist()):  # tokens from the end of each row
        places = last[:rows] - distance
        following = sums[places] + scale * following[:rows] if distance else sums[places]
        sums[places] = following
    return torch.from_numpy(sums).to(values.device)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float, lengths: Tensor | None = None) -> Tensor:
    """Compute discounted returns ``G_t = r_t + gamma * G_{t+1}`` over the tokens of the mask, 0 outside.

    See :func:`generalized_advantages` for arguments and forms.
    """
    return generalized_advantages(rewards, torch.zeros_like(rewards), mask, gamma, 1.0, lengths)[0]


@register_advantage("gae", reads_packed=True, scope="rows", whitens=True)
def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compute GAE (:func:`generalized_advantages`), which is then whitened over all trained tokens of the batch."""
    assert inputs.values is not None
    return generalized_advantages(
        inputs.token_level_rewards, inputs.values, inputs.response_mask, inputs.gamma, inputs.lam, inputs.lengths
    )


@register_advantage("reinforce_plus_plus", reads_packed=True, scope="rows", whitens=True)
def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): returns whitened over all trained tokens of a batch.

    ``A_t = (G_t - mean) / std`` with ``G_t = sum_{k >= t} gamma^(k - t) r_k``. The paper also has a KL term in the
    reward: ``algorithm.use_kl_in_reward`` with ``kl_penalty=k1``.
    """
    returns = discounted_returns(inputs.token_level_rewards, inputs.response_mask, inputs.gamma, inputs.lengths)
    return returns, returns


@register_advantage("remax", reads_packed=True, scope="rows")
def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """ReMax (Li et al. 2023, arXiv:2310.10505): the return minus the score of the prompt's greedy response.

    ``A_t = sum_{k >= t} r_k - r(x, greedy response to x)``, undiscounted as in the paper.
    """
    assert inputs.reward_baselines is not None
    returns = discounted_returns(inputs.token_level_rewards, inputs.response_mask, 1.0, inputs.lengths)
    relative = returns - expand_to_tokens(inputs.reward_baselines.to(returns.dtype), returns, inputs.lengths)
    return torch.where(inputs.response_mask.bool(), relative, torch.zeros_like(relative)), returns


@register_advantage("rft", reads_packed=True, scope="rows")
def rft(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Rejection-sampling fine-tuning (RAFT, Dong et al. 2023, arXiv:2304.06767, section 3.1): imitate kept responses.

    The advantage is 1 for every trained token, regardless of its reward. With the loss ``reinforce``, ``-A log p``,
    that is supervised learning on the responses that ``algorithm.best_of_n`` keeps.
    """
    return inputs.response_mask.to(inputs.token_level_rewards.dtype), discounted_returns(
        inputs.token_level_rewards, inputs.response_mask, 1.0, inputs.lengths
    )
