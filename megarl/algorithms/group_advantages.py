"""Group-relative advantages without a critic: GRPO, RLOO, OPO, GPG, OTB, GiGPO, REINFORCE++ with a group baseline.

A group is all responses to one prompt. With ``s_i`` the sum of the rewards of response ``i``, an estimator gives all
trained tokens of a response one number that compares ``s_i`` with its group; OTB compares time steps, GiGPO
also turns. Groups may differ in size. A group of one has the baseline 0 and the standard deviation 1. A row without a
trained token belongs to no group.

GiGPO's turns, and the states in which they begin, are at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageInputs, Turns, discounted_returns, register_advantage
from megarl.algorithms.masked import (
    expand_to_tokens,
    flat_tokens,
    have_tokens,
    sequence_counts,
    sequence_starts,
    sequence_sums,
)

State = str | tuple[int, ...]
"""State of an environment before a turn: a text, or token ids."""
EPS = 1e-6
"""Keeps the division by a standard deviation of 0 finite."""
ENERGY_EPS = 1e-8
"""Keeps the optimal token baseline of deterministic policies finite, whose energy is 0."""


class GroupedScores:
    """Scores of responses with the statistics of their groups, in double precision.

    Attributes:
        mask: ``[n]`` bool, trained tokens of packed responses.
        counted: ``[b]`` bool, rows with a trained token; other rows are in no statistic.
        scores: ``[b]``, the sum of a row's rewards; 0 for rows that do not count.
        size: ``[b]``, counted rows of each row's group.
        several: ``[b]`` bool, whether the group has at least two counted rows.
    """

    def __init__(self, inputs: AdvantageInputs) -> None:
        assert inputs.group_ids is not None
        self.mask, self._lengths = inputs.response_mask.bool(), inputs.lengths
        self.counted = have_tokens(self.mask, self._lengths)
        rewards = inputs.token_level_rewards
        sums = sequence_sums(rewards, torch.ones_like(self.mask), self._lengths)
        self.scores = torch.where(self.counted, sums, 0.0)
        self._dtype = inputs.token_level_rewards.dtype
        _, groups = np.unique(inputs.group_ids.astype(str), return_inverse=True)
        self._group = torch.from_numpy(groups.reshape(-1)).to(self.mask.device)
        self.size = self.sum(self.counted.double())
        self.several = self.size > 1

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum ``numbers [b, ...]`` over each row's group; numbers of rows that do not count must be 0."""
        total = torch.zeros_like(numbers)
        return total.index_add(0, self._group, numbers)[self._group]

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the maximum of ``numbers [b]`` over the counted rows of each group; ``-inf`` if no row counts."""
        largest = np.full(len(numbers), -np.inf)
        np.maximum.at(largest, self._group[self.counted].numpy(force=True), numbers[self.counted].numpy(force=True))
        return torch.from_numpy(largest).to(numbers.device)[self._group]

    def mean(self) -> Tensor:
        """Return the mean score of each row's group, ``[b]``; 0 in a group of one."""
        return torch.where(self.several, self.sum(self.scores) / self.size.clamp(min=1), 0.0)

    def deviation(self) -> Tensor:
        """Return the sample standard deviation of each row's group, ``[b]``; 1 in a group of one."""
        residuals = torch.where(self.counted, self.scores - self.mean(), 0.0)
        variance = self.sum(residuals**2) / (self.size - 1).clamp(min=1)
        return torch.where(self.several, variance.sqrt(), 1.0)

    def relative(self, *, norm_by_std: bool) -> Tensor:
        """Compare each score with its group, ``[b]``: ``s - mean``, with ``norm_by_std`` over the deviation."""
        relative = self.scores - self.mean()
        return relative / (self.deviation() + EPS) if norm_by_std else relative

    def to_tokens(self, per_row: Tensor) -> Tensor:
        """Repeat ``per_row [b]`` on every trained token of its row, ``[n]`` in the dtype of the rewards."""
        per_token = expand_to_tokens(per_row.to(self._dtype), self.mask, self._lengths)
        return torch.where(self.mask, per_token, 0.0)

    def steps(self) -> tuple[Tensor, int]:
        """Number the time steps: the t-th trained tokens of a group's responses have one number.

        Returns:
            Number of each trained token, ``[trained tokens]``, and the count of numbers.
        """
        counts = sequence_counts(self.mask, self._lengths)
        groups = int(self._group.max()) + 1
        longest = torch.zeros(groups, dtype=torch.int64).scatter_reduce(0, self._group, counts, "amax")
        first = sequence_starts(longest)[self._group]
        shift = torch.repeat_interleave(first - sequence_starts(counts), counts)
        return torch.arange(len(shift)) + shift, int(longest.sum())


@register_advantage("grpo", "grpo_vectorized", reads_packed=True, scope="groups")
def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): ``(s - mean) / (std + eps)`` over the group.

    ``std`` is the sample standard deviation. Without ``norm_by_std``: ``s - mean``, as in Dr.GRPO (Liu et al. 2025,
    arXiv:2503.20783), which aggregates with ``seq-mean-token-sum-norm``.
    """
    groups = GroupedScores(inputs)
    advantages = groups.to_tokens(groups.relative(norm_by_std=inputs.norm_by_std))
    return advantages, advantages


@register_advantage("grpo_passk", reads_packed=True, scope="groups")
def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GRPO for pass@k (Tang et al. 2025, arXiv:2503.19595): only the best response of a group gets an advantage.

    The advantage is ``s_best - s_second``, divided by ``std + eps`` with ``norm_by_std``. All other responses, and a
    group of one, get 0. If two responses tie for the best, all get 0.
    """
    groups = GroupedScores(inputs)
    best = groups.largest(groups.scores)
    is_best = groups.counted & (groups.scores == best)
    second = groups.largest(torch.where(is_best, -torch.inf, groups.scores))
    unique_best = is_best & (groups.sum(is_best.double()) == 1) & groups.several
    lead = torch.where(unique_best, groups.scores - second, 0.0)
    if inputs.norm_by_std:
        lead = lead / (groups.deviation() + EPS)
    advantages = groups.to_tokens(lead)
    return advantages, advantages


@register_advantage("rloo", "rloo_vectorized", reads_packed=True, scope="groups")
def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740): a leave-one-out baseline.

    ``A_i = s_i - sum_{j != i} s_j / (n - 1)``.
    """
    groups = GroupedScores(inputs)
    others = (groups.sum(groups.scores) - groups.scores) / (groups.size - 1).clamp(min=1)
    advantages = groups.to_tokens(groups.scores - others)
    return advantages, advantages


@register_advantage("reinforce_plus_plus_baseline", reads_packed=True, scope="groups", whitens=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv:2501.03262).

    ``A = s - group mean``, then whitened over all trained tokens of the batch.
    """
    groups = GroupedScores(inputs)
    advantages = groups.to_tokens(groups.scores - groups.mean())
    return advantages, advantages


@register_advantage("opo", reads_packed=True, scope="groups")
def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """OPO (Hao et al. 2025, arXiv:2505.23585): the minimum-variance baseline, weighted by length.

    ``A_i = s_i - sum_j l_j s_j / sum_j l_j`` with ``l`` the trained tokens of a response.
    """
    groups = GroupedScores(inputs)
    counts = inputs.trained_counts
    lengths = (sequence_counts(groups.mask, inputs.lengths) if counts is None else counts).double()
    baseline = groups.sum(lengths * groups.scores) / groups.sum(lengths).clamp(min=1)
    advantages = groups.to_tokens(groups.scores - torch.where(groups.several, baseline, 0.0))
    return advantages, advantages


@register_advantage("gpg", reads_packed=True, scope="groups")
def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GPG (Chu et al. 2025, arXiv:2504.02546): ``alpha (s - mean)``, for the loss ``gpg``.

    ``alpha = B / (B - M)`` compensates for the ``M`` of all ``B`` responses in zero-variance groups, which give no
    gradient; the normalisation ``F_norm`` is 1.
    """
    groups = GroupedScores(inputs)
    relative = torch.where(groups.counted, groups.scores - groups.mean(), 0.0)
    highest, lowest = groups.largest(groups.scores), -groups.largest(-groups.scores)
    # Equal sums of token rewards may differ by rounding.
    rounding = 64 * torch.finfo(groups.scores.dtype).eps * highest.abs().clamp(min=1)
    spread = torch.where(groups.several, highest - lowest, groups.scores.abs())
    informative = groups.counted & (spread > rounding)
    alpha = groups.counted.double().sum() / informative.double().sum().clamp(min=1)
    advantages = groups.to_tokens(alpha * relative)
    return advantages, advantages


@register_advantage("optimal_token_baseline", "tir_optimal_token_baseline", reads_packed=True, scope="group_tokens")
def optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """OTB: subtract from each token's return the minimum-variance baseline of its time step (optimal token baseline).

    ``A_t = G_t - sum_j G_{j,t} W_{j,t} / (sum_j W_{j,t} + 1e-8)`` over the group's responses ``j``, with the return
    ``G_t = sum_{k >= t} r_k``. The realized energy ``W_t = sum_{k <= t} w_k`` with ``w_k = 1 - 2 p_k + sum_v p_k(v)^2``
    is a proxy of the squared norm of the score function: ``w_k`` is its square with respect to the logits
    (https://richardli.xyz/optimal-token-baseline). Importance weights ``rho_k`` of rollout correction scale ``w_k`` by
    ``rho_k^2``.

    Time steps are trained tokens, so the ``t``-th trained tokens of the group are compared, whatever tool results are
    between them. A step that only one response of the group reaches has the baseline 0.
    """
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None
    groups = GroupedScores(inputs)
    mask, counts = groups.mask, sequence_counts(groups.mask, inputs.lengths)
    returns = discounted_returns(inputs.token_level_rewards, mask, 1.0, inputs.lengths)
    energy = (1 - 2 * inputs.old_log_probs[mask].double().exp() + inputs.sum_pi_squared[mask].double()).clamp(min=0)
    if inputs.rollout_is_weights is not None:
        energy = energy * inputs.rollout_is_weights[mask].double().square()
    weights = torch.cat([row.cumsum(0) for row in energy.split(counts.tolist())])
    steps, count = groups.steps()
    numerator = torch.bincount(steps, weights * returns[mask].double(), minlength=count)
    baselines = numerator / (torch.bincount(steps, weights, minlength=count) + ENERGY_EPS)
    baselines = torch.where(torch.bincount(steps, minlength=count) > 1, baselines, 0.0)
    advantages = torch.zeros_like(returns)
    advantages[mask] = (returns[mask] - baselines[steps]).to(returns.dtype)
    return advantages, returns


@register_advantage("gigpo", reads_packed=True, scope="group_tokens")
def gigpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GiGPO (Feng et al. 2025, arXiv:2505.10978): compare whole responses, and turns from the same anchor state.

    ``A = A_E + w A_S``, equation 8. The episode-level ``A_E`` is GRPO's. The step-level ``A_S = (G - mean) / F`` of a
    turn compares its discounted return ``G_t = sum_{k >= t} gamma^(k - t) r_k`` over turns with those of the turns that
    begin in the same state, in any response of the group. ``F`` is 1, with ``norm_by_std`` the sample standard
    deviation plus epsilon. A turn whose state no other turn has gets ``A_S = 0``. All tokens of a turn have its
    advantage.
    """
    assert inputs.turns is not None and inputs.lengths is not None
    groups = GroupedScores(inputs)
    relative = groups.relative(norm_by_std=inputs.norm_by_std)
    of_turns = _step_advantages(inputs, groups)
    rows = torch.repeat_interleave(torch.arange(len(of_turns)), inputs.lengths)[groups.mask]
    advantages = torch.zeros_like(inputs.token_level_rewards, dtype=torch.double)
    turn = inputs.turns.numbers[groups.mask].clamp(min=0)
    advantages[groups.mask] = relative[rows] + inputs.step_advantage_w * of_turns[rows, turn]
    advantages = advantages.to(inputs.token_level_rewards.dtype)
    return advantages, advantages


def _step_advantages(inputs: AdvantageInputs, groups: GroupedScores) -> Tensor:
    """GiGPO's advantage of each turn over the other turns from its state, ``[b, T]`` doubles."""
    turns = inputs.turns
    assert turns is not None
    returns = sums_per_turn(inputs.token_level_rewards, turns, inputs.lengths)
    for turn in reversed(range(returns.shape[1] - 1)):
        returns[:, turn] += inputs.gamma * returns[:, turn + 1]
    trained = trained_turns(turns, groups.mask, inputs.lengths)
    compared, (_, anchors) = returns[trained], turns.anchors[trained].unique(return_inverse=True)
    size = torch.bincount(anchors).clamp(min=1)
    mean = torch.bincount(anchors, compared) / size
    relative = compared - mean[anchors]
    if inputs.norm_by_std:
        variance = torch.bincount(anchors, relative**2) / (size - 1).clamp(min=1)
        relative = relative / (variance.sqrt()[anchors] + EPS)
    return torch.zeros_like(returns).masked_scatter(trained, relative)


def turn_numbers(generated: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Number the turns of each response; a turn is a run of generated tokens with the observation after it.

    Args:
        generated: ``[b, R]`` or packed ``[n]``; 1 = generated by the policy, 0 = from the environment, or padding.

    Returns:
        int64 in the shape of ``generated``, from 0; -1 for tokens before the first turn.
    """
    mask, counts = flat_tokens(generated.bool(), lengths)
    begins = mask.clone()
    begins[1:] &= ~mask[:-1]
    starts = sequence_starts(counts)[counts > 0]
    begins[starts] = mask[starts]
    turns = begins.cumsum(0)
    before = (turns - begins.long())[starts]  # turns of the responses before each one
    numbers = turns - torch.repeat_interleave(before, counts[counts > 0]) - 1
    return numbers.view_as(generated)


def observations(
    responses: Tensor, generated: Tensor, numbers: Tensor, lengths: Tensor | None = None
) -> list[list[State]]:
    """List the state before each turn as the observation before it: the token ids of the environment.

    Args:
        responses: token ids.
        numbers: of ``generated``, from :func:`turn_numbers`.

    Returns:
        One list per row with one state per turn; the state before the first turn, the prompt, is empty.
    """
    counts = flat_tokens(responses, lengths)[1].tolist()
    parts = [flat_tokens(tokens, lengths)[0].split(counts) for tokens in (responses, generated.bool(), numbers)]
    return [_states(ids.numpy(), ~mask.numpy(), turns.numpy()) for ids, mask, turns in zip(*parts, strict=True)]


def _states(ids: np.ndarray, outside: np.ndarray, turns: np.ndarray) -> list[State]:
    count = int(turns[-1]) + 1 if len(turns) else 0
    return [() if turn == 0 else tuple(ids[outside & (turns == turn - 1)].tolist()) for turn in range(count)]


def anchor_groups(states: Sequence[Sequence[State]], group_ids: Sequence[Hashable], similarity: float | None) -> Tensor:
    """Group the turns of the responses to one prompt by the state in which they begin (GiGPO's anchor states).

    Args:
        states: one state per turn of each row.
        similarity: None: states of a group are equal. Otherwise a state joins the first group whose first state is at
            least so similar, by the ratio of ``difflib.SequenceMatcher``.

    Returns:
        ``[b, T]`` int64, number of each turn's group; -1 for rows with fewer turns.
    """
    width = max(map(len, states), default=0)
    anchors = torch.full((len(states), max(width, 1)), -1, dtype=torch.int64)
    numbers: dict[tuple[Hashable, State], int] = {}
    firsts: dict[Hashable, list[State]] = defaultdict(list)
    count = 0
    for row, (turns, prompt) in enumerate(zip(states, group_ids, strict=True)):
        for turn, state in enumerate(turns):
            if (prompt, state) not in numbers:
                others = firsts[prompt] if similarity is not None else []
                same = next((other for other in others if _are_similar(other, state, similarity or 1.0)), None)
                if same is None:
                    firsts[prompt].append(state)
                    numbers[prompt, state], count = count, count + 1
                else:
                    numbers[prompt, state] = numbers[prompt, same]
            anchors[row, turn] = numbers[prompt, state]
    return anchors


def _are_similar(first: State, second: State, threshold: float) -> bool:
    if isinstance(first, str) != isinstance(second, str):
        return False
    matcher: SequenceMatcher[str] | SequenceMatcher[int]
    if isinstance(first, str) and isinstance(second, str):
        matcher = SequenceMatcher(None, first, second, autojunk=False)
    else:
        assert isinstance(first, tuple) and isinstance(second, tuple)
        matcher = SequenceMatcher(None, first, second, autojunk=False)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # upper bounds, the cheapest first
    return all(bound() >= threshold for bound in bounds)


def sums_per_turn(values: Tensor, turns: Turns, lengths: Tensor | None = None) -> Tensor:
    """Sum ``values``, in the form of ``turns.numbers``, over the tokens of each turn: ``[b, T]`` doubles."""
    (values, counts), (numbers, _) = flat_tokens(values, lengths), flat_tokens(turns.numbers, lengths)
    rows = torch.repeat_interleave(torch.arange(len(counts), device=values.device), counts)
    inside = torch.where(numbers >= 0, values.double(), 0.0)
    sums = torch.zeros(turns.anchors.shape, dtype=torch.float64, device=values.device)
    return sums.index_put_((rows, numbers.clamp(min=0)), inside, accumulate=True)


def trained_turns(turns: Turns, mask: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mark the turns with a token in the mask, ``[b, T]`` bool; see :func:`sums_per_turn` for the forms."""
    return (turns.anchors >= 0) & (sums_per_turn(mask, turns, lengths) > 0)


class TurnCounts(NamedTuple):
    """Counts of trained turns and their anchor states, over some groups of responses.

    Attributes:
        states: different anchor states.
        turns: trained turns.
        compared: trained turns whose state another trained turn has too.
    """

    states: int = 0
    turns: int = 0
    compared: int = 0

    @classmethod
    def of(cls, turns: Turns, mask: Tensor, lengths: Tensor | None = None) -> TurnCounts:
        """Count the trained turns of responses; see :func:`sums_per_turn` for the forms of ``mask``."""
        trained = trained_turns(turns, mask, lengths)
        sizes = np.unique(turns.anchors[trained].numpy(force=True), return_counts=True)[1]
        return cls(len(sizes), int(sizes.sum()), int(sizes[sizes > 1].sum()))

    @classmethod
    def merged(cls, parts: Sequence[TurnCounts]) -> TurnCounts:
        """Add up the counts of disjoint groups."""
        return cls(*map(sum, zip(*parts, strict=True)))
