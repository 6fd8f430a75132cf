"""Training on stale samples without a correction is rejected by name, with keys that correct."""

import pytest
from config_cases import check_problem, problems_of, with_keys

from megarl.config import TrainConfig
from megarl.config.build import build

ACTOR, RC = "actor_rollout_ref.actor", "algorithm.rollout_correction"
STALE = {
    "async_training.mode": "disaggregated",
    "async_training.max_staleness": 1.0,
    "actor_rollout_ref.rollout.nnodes": 1,
    "data.train_batch_size": 256,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
}
TOKEN = {**STALE, f"{RC}.rollout_is": "token"}
LOGLINEAR = {**TOKEN, "async_training.proximal": "loglinear"}
BYPASS = {**STALE, f"{RC}.bypass_mode": True}
HELD = {
    **STALE,
    "async_training.max_staleness": 0.0,
    "async_training.sync_interval": 2,
    "data.train_batch_size": 512,
}


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({**TOKEN, "actor_rollout_ref.rollout.calculate_log_probs": False},
         "actor_rollout_ref.rollout.calculate_log_probs", "rollout.log-probs-needed: set true"),
        (STALE, f"{RC}.rollout_is", "async.no-correction: async_training.max_staleness=1"),
        (HELD, f"{RC}.rollout_is", "async.no-correction: async_training.sync_interval=2"),
        ({**LOGLINEAR, f"{RC}.rollout_is": None}, f"{RC}.rollout_is", "async.loglinear-token-level: set token"),
        ({**LOGLINEAR, f"{RC}.rollout_is": "sequence"}, f"{RC}.rollout_is", "async.loglinear-token-level: set token"),
        ({**LOGLINEAR, f"{RC}.rollout_rs": "token_k1", f"{RC}.rollout_rs_threshold": "2"}, f"{RC}.rollout_rs",
         "async.loglinear-correction: set null"),
        ({**LOGLINEAR, f"{RC}.rollout_is_batch_normalize": True}, f"{RC}.rollout_is_batch_normalize",
         "async.loglinear-correction: set false"),
        ({**LOGLINEAR, f"{ACTOR}.state_masking": False}, f"{ACTOR}.state_masking",
         "async.loglinear-state-masking: set true"),
        ({**LOGLINEAR, "algorithm.repr_align.enable": True, "algorithm.repr_align.ref_alignment.enable": True},
         "algorithm.repr_align.enable", "async.loglinear-repr-align: async_training.proximal=recompute"),
        ({**LOGLINEAR, f"{ACTOR}.router_replay.mode": "R2"}, f"{ACTOR}.router_replay.mode",
         "async.loglinear-router-replay: async_training.proximal=loglinear"),
        ({**BYPASS, f"{ACTOR}.router_replay.mode": "R2"}, f"{ACTOR}.router_replay.mode",
         f"algorithm.bypass-router-replay: {RC}.bypass_mode=true"),
        ({**BYPASS, f"{ACTOR}.policy_loss.loss_mode": "reinforce"}, f"{ACTOR}.policy_loss.loss_mode",
         "async.loss-without-ratio: dppo_tv"),
        ({"async_training.proximal": "loglinear"}, "async_training.proximal", "async.proximal-in-sync: set recompute"),
    ],
)  # fmt: skip
def test_stale_samples_without_a_correction(values, path, expected):
    check_problem(problems_of(values)[path], expected)


@pytest.mark.parametrize(
    ("values", "held", "estimated"),
    [
        (TOKEN, False, False),
        ({**TOKEN, **HELD}, True, False),
        (LOGLINEAR, False, True),
        ({**LOGLINEAR, **HELD}, False, True),
        ({**STALE, f"{RC}.rollout_rs": "seq_mean_k1", f"{RC}.rollout_rs_threshold": "1.1"}, False, False),
        ({**TOKEN, f"{ACTOR}.policy_loss.loss_mode": "reinforce"}, False, False),
        ({**BYPASS, f"{ACTOR}.policy_loss.loss_mode": "m2po"}, False, False),
        ({**BYPASS, **HELD}, False, False),
        ({**STALE, "async_training.max_staleness": 0.0}, False, False),
    ],
)
def test_corrections_of_stale_samples(values, held, estimated):
    config = build(TrainConfig, with_keys(values))
    assert (config.holds_proximal_policy, config.estimates_proximal_policy) == (held, estimated)
