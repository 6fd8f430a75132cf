"""The `async_training` section: generation across training steps."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.keys import key

SYNC, COLOCATED, DISAGGREGATED = "sync", "colocated", "disaggregated"
RECOMPUTE, LOGLINEAR = "recompute", "loglinear"


@dataclass(frozen=True)
class AsyncTrainingConfig:
    """Generation and training at the same time; see docs/how_to/asynchronous.md."""

    mode: str = key(
        SYNC,
        "sync = a step generates, then trains, on the same devices; colocated = likewise, and training begins when a "
        "batch is complete: responses in flight pause and continue after the weight sync; disaggregated = the engines "
        "have devices of their own (`rollout.nnodes`) and generate during training.",
        choices=(SYNC, COLOCATED, DISAGGREGATED),
    )
    max_staleness: float = key(
        0.0,
        "Largest staleness of a trained token, in weight versions; so many batches are admitted ahead. A fraction "
        "admits that part of a batch. 0 = synchronous.",
        at_least=0,
    )
    sync_interval: int = key(
        1,
        "Mini-batches between weight syncs in disaggregated mode, each trained as soon as its groups are complete; "
        "`sync_interval` x `ppo_mini_batch_size` = `train_batch_size`.",
        at_least=1,
    )
    partial_rollout: bool = key(
        True,
        "A weight sync interrupts the responses in flight and continues them with the new weights; false = it waits "
        "for their ends.",
    )
    sync_wave_size: int | None = key(
        None,
        "Replicas that hold their responses and receive the weights at the same time in disaggregated mode, wave after "
        "wave, while the others generate (rolling sync); null = all.",
        at_least=1,
    )
    hybrid_rollout: bool = key(
        False,
        "The trainer's devices have engine replicas too, which generate in disaggregated mode from a weight sync until "
        "the first mini-batch is complete, if that saves more time than the switch takes.",
    )
    proximal: str = key(
        RECOMPUTE,
        "Old log-probs of stale samples, about which the ratio is clipped: recompute = by a forward pass with the "
        "weights of the last sync; loglinear = an estimate by weight versions, without a pass "
        "(docs/reference/rollout_correction.md). `algorithm.rollout_correction.bypass_mode` uses the engine's instead.",
        choices=(RECOMPUTE, LOGLINEAR),
    )
