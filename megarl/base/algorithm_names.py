"""Names of advantage estimators, losses and KL estimators, with the facts that the configuration needs.

This is the only list of these names. The configuration schema offers them as choices without importing torch; the
registries in :mod:`megarl.algorithms` read the facts from here, and a test compares registries and list.
"""

from __future__ import annotations

from collections.abc import Mapping

ADV_ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "gae": ("values",),
    "grpo": ("group_ids",),
    "grpo_vectorized": ("group_ids",),
    "grpo_passk": ("group_ids",),
    "rloo": ("group_ids",),
    "rloo_vectorized": ("group_ids",),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": ("group_ids",),
    "remax": ("reward_baselines",),
    "opo": ("group_ids",),
    "gpg": ("group_ids",),
    "optimal_token_baseline": ("group_ids", "old_log_probs", "sum_pi_squared"),
    "tir_optimal_token_baseline": ("group_ids", "old_log_probs", "sum_pi_squared"),
    "gigpo": ("group_ids", "turns"),
    "rft": (),
}
"""Advantage estimators and their required inputs: ``values`` (critic), ``group_ids`` (several responses per prompt),
``reward_baselines`` (score of a greedy response), ``old_log_probs`` and ``sum_pi_squared`` (pass of the actor),
``turns`` (of multi-turn agents)."""
GIGPO = "gigpo"
"""Group-in-group policy optimization: the estimator that compares responses, and turns from the same state."""
GIGPO_MODES: Mapping[str, bool] = {"mean_norm": False, "mean_std_norm": True}
"""Normalizations of GiGPO, and whether they divide by the standard deviation."""

LOSS_MODES: Mapping[str, str] = {
    "vanilla": "token-mean",
    "gspo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
    "cispo": "token-mean",
    "reinforce": "token-mean",
    "gpg": "token-mean",
    "sapo": "seq-mean-token-mean",
    "clip_cov": "token-mean",
    "kl_cov": "token-mean",
    "dppo_tv": "token-mean",
    "dppo_kl": "token-mean",
    "m2po": "token-mean",
    "topr": "seq-mean-token-sum",
}
"""Policy losses and their default ``loss_agg_mode``."""

LOSSES_WITHOUT_RATIO = ("reinforce", "gpg")
"""Policy losses that read no importance ratio, so that they cannot correct for stale samples."""
STALE_DATA_LOSSES = ("dppo_tv", "dppo_kl", "m2po", "topr")
"""Policy losses for stale samples, whose ratio may be about the sampling policy."""

DEFAULT_AGGREGATION = "token-mean"
"""``loss_agg_mode`` of a custom policy loss, as of PPO's."""

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

PREFERENCE_LOSS_TYPES: Mapping[str, bool] = {"dpo": True, "ipo": True, "hinge": True, "simpo": False}
"""Losses of preference optimization on pairs, and whether they need a reference."""
KTO = "kto"
"""The loss of preference optimization on single responses, desirable or undesirable; it needs a reference."""

FULL_KL = "full"
"""The exact KL over the whole vocabulary; it is no per-token estimator and not in the registry."""
_KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*_KL_ESTIMATES, *(f"{name}+" for name in _KL_ESTIMATES), FULL_KL)
"""KL estimators; a ``+`` keeps the value of the estimator and takes the gradient of k2."""
KL_CONTROLLER_TYPES = ("fixed", "adaptive")

FORWARD_KL_TOPK = "forward_kl_topk"
"""Distillation: the KL from teacher to student over the teacher's most probable tokens."""
DISTILLATION_MODES = (*_KL_ESTIMATES, FULL_KL, FORWARD_KL_TOPK)
"""Divergences between teacher and student."""

REWEIGHT_KINDS = ("pow", "max_min", "max_random")
"""PF-PPO: probabilities of responses by their scores."""

WEIGHT_SCHEDULES = ("linear", "sigmoid", "cosine", "exp", "step", "constant")
"""Warm-up shapes for a reward-shaping weight."""


def estimator_needs(name: str, required: str) -> bool:
    """Return whether the advantage estimator ``name`` requires an input; nothing is known of custom estimators."""
    return required in ADV_ESTIMATORS.get(name, ())


def default_aggregation(loss_mode: str) -> str:
    """Return the default ``loss_agg_mode`` of a policy loss, built-in or custom."""
    return LOSS_MODES.get(loss_mode, DEFAULT_AGGREGATION)
