"""Checks of training on stale samples: it needs log-probs of the sampling policy, and a correction by them."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.base.algorithm_names import LOSSES_WITHOUT_RATIO, STALE_DATA_LOSSES
from megarl.config.problems import Problem
from megarl.config.schema.jobs import TrainConfig

PROXIMAL_POLICIES = ("recompute", "loglinear", "engine")
"""Sources of old log-probs: a pass with the weights of the last sync, an estimate by versions, or the engine."""
_CORRECTION = "algorithm.rollout_correction"


def stale_data(
    config: TrainConfig, *, max_staleness: float, proximal: str, path: str = "async_training"
) -> Iterator[Problem]:
    """Check that samples of older weights get a correction; none is needed without staleness.

    Args:
        config: valid key by key.
        max_staleness: most weight versions between sampling and training.
        proximal: source of the old log-probs, one of :data:`PROXIMAL_POLICIES`.
        path: section with both keys.
    """
    if max_staleness == 0:
        return
    rollout, state_masking = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.state_masking
    if not rollout.calculate_log_probs:
        text = f"{path}.max_staleness={max_staleness:g} needs the log-probs of the sampling policy; set true"
        yield Problem("actor_rollout_ref.rollout.calculate_log_probs", rollout.calculate_log_probs, text)
    if proximal != "recompute" and not state_masking:
        text = f"{path}.proximal={proximal} needs the engine's log-prob of every trained token; set true"
        yield Problem("actor_rollout_ref.actor.state_masking", state_masking, text)
    align = config.algorithm.repr_align.enable
    if proximal != "recompute" and align:
        text = f"needs the policy's entropy, which {path}.proximal={proximal} does not compute; set recompute there"
        yield Problem("algorithm.repr_align.enable", align, text)
    if proximal == "engine":
        yield from _engine(config, path)
    else:
        yield from _weighted(config, proximal, path)


def _engine(config: TrainConfig, path: str) -> Iterator[Problem]:
    """Check the correction without a proximal policy: the loss itself, by its ratio to the sampling policy."""
    correction, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss in LOSSES_WITHOUT_RATIO:
        names = ", ".join(("vanilla", *STALE_DATA_LOSSES))
        text = f"reads no ratio: with {path}.proximal=engine stale samples count like fresh ones; set one of {names}"
        yield Problem("actor_rollout_ref.actor.policy_loss.loss_mode", loss, text)
    for name, value in (("rollout_is", correction.rollout_is), ("rollout_rs", correction.rollout_rs)):
        if value is not None:
            text = f"{path}.proximal=engine leaves nothing to compare the engine's log-probs with; set one only"
            yield Problem(f"{_CORRECTION}.{name}", value, text)


def _weighted(config: TrainConfig, proximal: str, path: str) -> Iterator[Problem]:
    """Check the correction with a proximal policy: weights, or rejection, by its ratio to the sampling policy."""
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode:
        text = f"replaces the log-probs of {path}.proximal={proximal}; set false, or {path}.proximal=engine"
        yield Problem(f"{_CORRECTION}.bypass_mode", correction.bypass_mode, text)
        return
    level = correction.rollout_is
    if level is None and (proximal == "loglinear" or correction.rollout_rs is None):
        text = (
            "stale samples need a correction: their ratio is about a policy that did not sample them; set token "
            f"(decoupled PPO), or {path}.proximal=engine with a loss that corrects by its ratio"
        )
        yield Problem(f"{_CORRECTION}.rollout_is", level, text)
    if proximal != "loglinear":
        return
    text = f"{path}.proximal=loglinear knows the weights of single tokens only, when it computes the loss; set "
    if level == "sequence":
        yield Problem(f"{_CORRECTION}.rollout_is", level, f"{text}token")
    if correction.rollout_rs is not None:
        yield Problem(f"{_CORRECTION}.rollout_rs", correction.rollout_rs, f"{text}null")
    if correction.rollout_is_batch_normalize:
        yield Problem(f"{_CORRECTION}.rollout_is_batch_normalize", True, f"{text}false")
