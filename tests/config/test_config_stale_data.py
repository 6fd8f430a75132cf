"""Training on stale samples without a correction is rejected by name, with keys that correct."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import with_keys

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.checks.stale_data import stale_data

ACTOR, RC = "actor_rollout_ref.actor", "algorithm.rollout_correction"
RECORDED = {"actor_rollout_ref.rollout.calculate_log_probs": True}
TOKEN = {**RECORDED, f"{RC}.rollout_is": "token"}


def problems(values: dict[str, Any], proximal: str, max_staleness: float = 1.0) -> dict[str, str]:
    config = build(TrainConfig, with_keys(values))
    return {p.path: p.text for p in stale_data(config, max_staleness=max_staleness, proximal=proximal)}


@pytest.mark.parametrize(
    ("values", "proximal", "path", "text"),
    [
        ({}, "recompute", "actor_rollout_ref.rollout.calculate_log_probs", "max_staleness=1 needs the log-probs"),
        (RECORDED, "recompute", f"{RC}.rollout_is", "set token (decoupled PPO)"),
        (RECORDED, "loglinear", f"{RC}.rollout_is", "set token (decoupled PPO)"),
        ({**RECORDED, f"{RC}.bypass_mode": True}, "recompute", f"{RC}.bypass_mode", "set false, or async_training"),
        ({**RECORDED, f"{RC}.rollout_is": "sequence"}, "loglinear", f"{RC}.rollout_is", "set token"),
        ({**TOKEN, f"{RC}.rollout_rs": "token_k1", f"{RC}.rollout_rs_threshold": "2"}, "loglinear", f"{RC}.rollout_rs",
         "set null"),
        ({**TOKEN, f"{RC}.rollout_is_batch_normalize": True}, "loglinear", f"{RC}.rollout_is_batch_normalize",
         "set false"),
        ({**TOKEN, f"{ACTOR}.state_masking": False}, "loglinear", f"{ACTOR}.state_masking", "set true"),
        ({**RECORDED, f"{ACTOR}.policy_loss.loss_mode": "reinforce"}, "engine", f"{ACTOR}.policy_loss.loss_mode",
         "set one of vanilla, dppo_tv, dppo_kl, m2po, topr"),
        (TOKEN, "engine", f"{RC}.rollout_is", "nothing to compare"),
        ({**RECORDED, "algorithm.repr_align.enable": True, "algorithm.repr_align.ref_alignment.enable": True}, "engine",
         "algorithm.repr_align.enable", "set recompute there"),
    ],
)  # fmt: skip
def test_stale_samples_without_a_correction(values: dict[str, Any], proximal: str, path: str, text: str) -> None:
    found = problems(values, proximal)
    assert list(found) == [path] or not values  # without log-probs of the engine the correction is missing too
    assert text in found[path]
    assert problems(values, proximal, max_staleness=0) == {}


@pytest.mark.parametrize(
    ("values", "proximal"),
    [
        (TOKEN, "recompute"),
        (TOKEN, "loglinear"),
        ({**RECORDED, f"{RC}.rollout_rs": "seq_mean_k1", f"{RC}.rollout_rs_threshold": "1.1"}, "recompute"),
        ({**TOKEN, f"{ACTOR}.policy_loss.loss_mode": "reinforce"}, "recompute"),
        (RECORDED, "engine"),
        ({**RECORDED, f"{RC}.bypass_mode": True, f"{ACTOR}.policy_loss.loss_mode": "m2po"}, "engine"),
    ],
)
def test_corrections_of_stale_samples(values: dict[str, Any], proximal: str) -> None:
    assert problems(values, proximal) == {}
