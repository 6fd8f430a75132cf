"""Checks of training on stale samples: it needs log-probs of the sampling policy, and a correction by them."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.base.algorithm_names import LOSSES_WITHOUT_RATIO, STALE_DATA_LOSSES
from megarl.config.problems import Problem
from megarl.config.schema.async_training import LOGLINEAR, RECOMPUTE, SYNC
from megarl.config.schema.jobs import TrainConfig

_CORRECTION, _PROXIMAL = "algorithm.rollout_correction", "async_training.proximal"
_REMEDY = (
    f"{_CORRECTION}.rollout_is=token (decoupled PPO), or {_CORRECTION}.bypass_mode=true with a loss that corrects by "
    "its ratio"
)


def stale_data(config: TrainConfig) -> Iterator[Problem]:
    """Check that samples of older weights get a correction; none is needed without staleness."""
    keys, correction = config.async_training, config.algorithm.rollout_correction
    if keys.mode == SYNC:
        if keys.proximal != RECOMPUTE:
            text = "a step of async_training.mode=sync has one weight version; set recompute"
            yield Problem(_PROXIMAL, keys.proximal, text)
        return
    if keys.max_staleness == 0 and keys.sync_interval == 1:
        return
    stale = "max_staleness" if keys.max_staleness > 0 else "sync_interval"
    label = f"async_training.{stale}={getattr(keys, stale):g}"
    rollout = config.actor_rollout_ref.rollout
    if not rollout.calculate_log_probs:
        text = f"{label} needs the log-probs of the policy that sampled; set true"
        yield Problem("actor_rollout_ref.rollout.calculate_log_probs", rollout.calculate_log_probs, text)
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.bypass_mode and loss in LOSSES_WITHOUT_RATIO:
        names = ", ".join(("vanilla", *STALE_DATA_LOSSES))
        text = f"reads no ratio: with {_CORRECTION}.bypass_mode stale samples count like fresh ones; set one of {names}"
        yield Problem("actor_rollout_ref.actor.policy_loss.loss_mode", loss, text)
    if config.estimates_proximal_policy:
        yield from _loglinear(config)
    elif not correction.bypass_mode and correction.rollout_is is None and correction.rollout_rs is None:
        text = f"{label} needs a correction: the ratio is about a policy that did not sample; set {_REMEDY}"
        yield Problem(f"{_CORRECTION}.rollout_is", correction.rollout_is, text)


def _loglinear(config: TrainConfig) -> Iterator[Problem]:
    """Check the inputs of a log-linear proximal policy, and weights that are known with the loss only."""
    correction, state_masking = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.state_masking
    label, level = f"{_PROXIMAL}={LOGLINEAR}", correction.rollout_is
    if not state_masking:
        text = f"{label} needs the engine's log-prob of every trained token; set true"
        yield Problem("actor_rollout_ref.actor.state_masking", state_masking, text)
    if config.algorithm.repr_align.enable:
        text = f"needs the policy's entropy, which {label} does not compute; set {_PROXIMAL}={RECOMPUTE}"
        yield Problem("algorithm.repr_align.enable", True, text)
    if level != "token":
        text = f"{label} knows the weights of single tokens, when it computes the loss; set token"
        yield Problem(f"{_CORRECTION}.rollout_is", level, text)
    for name, off, word in (("rollout_rs", None, "null"), ("rollout_is_batch_normalize", False, "false")):
        if (value := getattr(correction, name)) != off:
            text = f"{label} knows the weights of a token only when it computes its loss; set {word}"
            yield Problem(f"{_CORRECTION}.{name}", value, text)
